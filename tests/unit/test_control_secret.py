from __future__ import annotations

import copy
import logging
import os
import pickle
import stat
import traceback
from pathlib import Path

import pytest

from argosy.control.secret import Secret


def test_new_secrets_differ_and_survive_hex() -> None:
    first, second = Secret.new(), Secret.new()
    assert first != second
    assert len(first.hex()) == 64
    assert Secret.from_hex(f" {first.hex().upper()}\n") == first
    assert hash(Secret.from_hex(first.hex())) == hash(first)
    assert first != first.hex()


def test_nothing_shows_it(caplog: pytest.LogCaptureFixture) -> None:
    secret = Secret.new()
    logging.getLogger("test").warning("secret: %s %r", secret, secret)
    shown = f"{secret} {secret!r} {[secret]} {caplog.text}"
    assert "hidden" in shown
    assert secret.hex() not in shown
    assert repr(bytes.fromhex(secret.hex())) not in shown


def test_it_does_not_change_nor_pickle() -> None:
    secret = Secret.new()
    with pytest.raises(AttributeError):
        secret._key = b""
    with pytest.raises(AttributeError):
        del secret._key
    with pytest.raises(TypeError, match="never pickled"):
        pickle.dumps(secret)
    assert not hasattr(secret, "__dict__")
    assert copy.copy(secret) is secret
    assert copy.deepcopy({"secret": secret})["secret"] is secret


@pytest.mark.parametrize("cut", [0, 1, 63, 65])
def test_wrong_text_is_refused_without_echo(cut: int) -> None:
    text = (Secret.new().hex() + "00")[:cut]
    with pytest.raises(ValueError, match="64 hexadecimal digits") as caught:
        Secret.from_hex(text)
    assert len(text) < 8 or text not in "".join(traceback.format_exception(caught.value))


def test_wrong_digits_are_refused_without_echo() -> None:
    text = "g" + Secret.new().hex()[1:]
    with pytest.raises(ValueError, match="64 hexadecimal digits") as caught:
        Secret.from_hex(text)
    assert text[1:] not in "".join(traceback.format_exception(caught.value))


def test_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes, got 3"):
        Secret(b"abc")


def test_file_round_trip_is_private(tmp_path: Path) -> None:
    secret, path = Secret.new(), tmp_path / "secret"
    old = os.umask(0)
    try:
        secret.write(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Secret.read(path) == secret
    assert Secret.read(str(path)) == secret


def test_write_never_overwrites_nor_follows(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("precious")
    with pytest.raises(FileExistsError, match="choose another path"):
        Secret.new().write(path)
    assert path.read_text() == "precious"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        Secret.new().write(link)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_read_refuses_an_open_file(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    Secret.new().write(path)
    path.chmod(mode)
    with pytest.raises(PermissionError, match=f"chmod 600 {path}"):
        Secret.read(path)


def test_read_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no secret file at .*absent"):
        Secret.read(tmp_path / "absent")
    garbled = tmp_path / "garbled"
    garbled.write_bytes(b"\xff" * 1000)
    garbled.chmod(0o600)
    with pytest.raises(ValueError, match=r"garbled is garbled"):
        Secret.read(garbled)
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    with pytest.raises(ValueError, match="folder is not a regular file"):
        Secret.read(folder)
    os.mkfifo(tmp_path / "pipe", mode=0o600)
    with pytest.raises(ValueError, match="pipe is not a regular file"):
        Secret.read(tmp_path / "pipe")
