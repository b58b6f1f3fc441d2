"""A checkpoint on disk is whole or absent, and damage is found."""

import errno
import itertools
import json
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_harness import STRANGE, State, assert_same
from torch import Tensor

from argosy.checkpoint import files, whole
from argosy.checkpoint.files import CheckpointError
from argosy.comm.group import SoloGroup

# Whole or absent.

OLD: dict[str, State] = {"model": {"w": torch.ones(3)}, "optimizer": {"lr": 0.1, "m": torch.zeros(3)}}
NEW: dict[str, State] = {"model": {"w": torch.full((3,), 2.0)}, "optimizer": {"lr": 0.2, "m": torch.ones(3)}}
OPERATIONS = {"save_file": files, "fsync": os, "replace": Path, "write_text": Path, "chmod": Path}


class Killed(BaseException):
    """The process ends here: nothing handles it."""


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def interrupted(
    monkeypatch: pytest.MonkeyPatch, operation: str, failure: Callable[[], BaseException], save: Callable[[], None]
) -> Iterator[BaseException]:
    """What `save` raises when its first, second, ... call of an operation fails, half done."""
    owner: Any = OPERATIONS[operation]
    real = getattr(owner, operation)
    for number in itertools.count():
        calls = itertools.count()

        def fail(*arguments: Any, number: int = number, calls: Iterator[int] = calls, **options: Any) -> Any:
            if next(calls) < number:
                return real(*arguments, **options)
            if operation == "save_file":
                arguments[1].write_bytes(b"half of it")
            elif operation == "write_text":
                real(arguments[0], arguments[1][:20], **options)
            raise failure()

        with monkeypatch.context() as patch:
            patch.setattr(owner, operation, fail)
            try:
                save()
            except (CheckpointError, Killed) as error:
                raised = error
            else:
                assert number > 0, f"{operation} was never called"
                return
        yield raised


def assert_only_what_the_manifest_names(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    named = {part["file"] for part in manifest["parts"].values()}
    assert {file.name for file in folder.iterdir()} == {"manifest.json", *named}


@pytest.mark.parametrize("failure", [full_disk, Killed], ids=["full disk", "killed"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_save_that_fails_at_any_step_leaves_a_whole_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, operation: str, failure: Callable[[], BaseException]
) -> None:
    files.write(folder, OLD)
    before = (folder / "manifest.json").read_bytes()
    for error in interrupted(monkeypatch, operation, failure, lambda: files.write(folder, NEW)):
        replaced = (folder / "manifest.json").read_bytes() != before
        assert_same(NEW if replaced else OLD, files.read(folder))
        assert not (replaced and "what was there before" in str(error)), "the error says what is there"
        files.write(folder, OLD)
        assert_only_what_the_manifest_names(folder)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_first_save_that_fails_leaves_no_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    for _ in interrupted(monkeypatch, operation, full_disk, lambda: files.write(folder, NEW)):
        if (folder / "manifest.json").exists():
            assert_same(NEW, files.read(folder))
            (folder / "manifest.json").unlink()
        else:
            with pytest.raises(CheckpointError, match=r"no checkpoint at .*manifest.json is missing"):
                files.read(folder)


def test_a_file_is_on_disk_before_its_name_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str]] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(("sync", os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)))
    monkeypatch.setattr(Path, "replace", lambda a, b: (done.append(("rename", str(a))), replace(a, b)))
    files.write(folder, OLD)
    renamed = [path for what, path in done if what == "rename"]
    assert len(renamed) == 3
    for path in renamed:
        assert done.index(("sync", path)) < done.index(("rename", path))
    manifest = done.index(("rename", str(folder / ".manifest.json.tmp")))
    folder_syncs = [number for number, what in enumerate(done) if what == ("sync", str(folder))]
    assert folder_syncs[0] < manifest, "the names in the manifest are on disk before it"
    assert folder_syncs[-1] > manifest


def test_a_new_checkpoint_replaces_the_old_and_nothing_else(folder: Path) -> None:
    files.write(folder, {**OLD, "model2": {"w": torch.ones(1)}})
    mine = [folder / name for name in ("notes.txt", ".mine.tmp", "model.safetensors", "model-best.safetensors")]
    for file in mine:
        file.write_text("mine")
    (folder / ".folder.tmp").mkdir()
    files.write(folder, NEW)
    assert_same(NEW, files.read(folder))
    assert [file.read_text() for file in mine] == ["mine"] * 4
    assert len(list(folder.glob("*-????????????????.safetensors"))) == 2


def test_a_path_that_cannot_hold_a_checkpoint_is_named(folder: Path) -> None:
    folder.write_text("a file of the user's")
    with pytest.raises(CheckpointError, match=str(folder)):
        files.write(folder, OLD)
    with pytest.raises(CheckpointError, match=str(folder)):
        files.read(folder)
    assert folder.read_text() == "a file of the user's"


# Damage.


@pytest.fixture
def saved(folder: Path) -> Path:
    files.write(folder, OLD)
    return folder


def model_file(folder: Path) -> Path:
    return next(folder.glob("model-*.safetensors"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data + b"\0",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: bytes([data[0] ^ 1]) + data[1:],
    ],
    ids=["truncated", "emptied", "grown", "last bit", "first bit"],
)
def test_a_damaged_file_is_named(saved: Path, damage: Callable[[bytes], bytes]) -> None:
    file = model_file(saved)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match="damaged") as caught:
        files.read(saved)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_named(saved: Path) -> None:
    file = model_file(saved)
    file.unlink()
    with pytest.raises(CheckpointError, match="missing") as caught:
        files.read(saved)
    assert str(file) in str(caught.value)


def edited(folder: Path, edit: Callable[[Any], None]) -> None:
    manifest = folder / "manifest.json"
    content = json.loads(manifest.read_text())
    edit(content)
    manifest.write_text(json.dumps(content))


EDITS: dict[str, Callable[[Any], Any]] = {
    "another format": lambda content: content.update(format="argosy-checkpoint-99"),
    "no format": lambda content: content.pop("format"),
    "no parts": lambda content: content.pop("parts"),
    "parts in a list": lambda content: content.update(parts=[]),
    "part is nothing": lambda content: content["parts"].update(model=None),
    "no digest": lambda content: content["parts"]["model"].pop("sha256"),
    "path upwards": lambda content: content["parts"]["model"].update(file="../x"),
    "path from the root": lambda content: content["parts"]["model"].update(file="/etc/passwd"),
    "file is a number": lambda content: content["parts"]["model"].update(file=3),
    "unknown kind": lambda content: content["parts"]["model"].update(form={"set": [1]}),
    "two kinds": lambda content: content["parts"]["model"].update(form={"list": [], "tuple": []}),
    "key is a list": lambda content: content["parts"]["model"].update(form={"dict": [[[], 1]]}),
    "no such tensor": lambda content: content["parts"]["model"].update(form={"tensor": "v"}),
    "another learning rate": lambda content: content["parts"]["optimizer"].update(form={"dict": [["lr", 0.3]]}),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_a_manifest_that_argosy_did_not_write_is_refused(saved: Path, edit: Callable[[Any], None]) -> None:
    edited(saved, edit)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        files.read(saved)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000], ids=lambda data: repr(data[:3])
)
def test_a_manifest_that_is_no_json_is_refused(saved: Path, content: bytes) -> None:
    (saved / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        files.read(saved)


class Trap:
    """Unpickling it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def pickled(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint in which a pickle stands for a tensor file; size, digest and all the rest are right."""
    trap = pickle.dumps(Trap(tmp_path / "executed"))
    monkeypatch.setattr(files, "save_file", lambda tensors, path: path.write_bytes(trap))
    files.write(folder, OLD)
    return folder


def test_a_pickle_is_refused_and_not_executed(pickled: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        files.read(pickled)
    assert model_file(pickled).name in str(caught.value)
    assert not (tmp_path / "executed").exists()


# With a group of workers.


class Threads(SoloGroup):
    """Members that are threads of this process. The real groups have tests of their own."""

    def __init__(self, rank: int, size: int, meet: threading.Barrier, table: dict[str, Tensor]) -> None:
        self.rank, self.size, self._meet, self._table = rank, size, meet, table

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        if self.rank == root:
            self._table["sent"] = tensor
        self._meet.wait()
        if self.rank != root:
            tensor.copy_(self._table["sent"])
        self._meet.wait()


def on_all_workers(work: Callable[[Threads], Any], size: int = 3) -> list[Any]:
    """What each worker returns or raises."""
    meet, table, results = threading.Barrier(size, timeout=2), {}, [None] * size

    def member(rank: int) -> None:
        try:
            results[rank] = work(Threads(rank, size, meet, table))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=member, args=[rank]) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_every_worker_loads_what_the_first_has_on_its_disk(folder: Path) -> None:
    state = {
        "model": {f"{number}": tensor for number, tensor in enumerate(STRANGE.values()) if not tensor.is_complex()}
    }
    assert on_all_workers(lambda group: whole.save(folder / str(group.rank), state, group)) == [None] * 3
    assert [path.name for path in folder.iterdir()] == ["0"], "one copy is written"
    for loaded in on_all_workers(lambda group: whole.load(folder / str(group.rank), group)):
        assert_same(state, loaded)


def test_all_workers_refuse_what_one_cannot_save(folder: Path) -> None:
    errors = on_all_workers(lambda group: whole.save(folder, {"model": {"rule": len}}, group))
    assert all(isinstance(error, (CheckpointError, TypeError)) for error in errors), errors
    assert all("rule" in str(error) for error in errors)


@pytest.mark.parametrize("kind", ["missing", "saved", "pickled"])
def test_all_workers_refuse_what_one_cannot_load(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path = tmp_path / "missing" if kind == "missing" else request.getfixturevalue(kind)
    if kind == "saved":
        model_file(path).write_bytes(b"damaged")
    errors = on_all_workers(lambda group: whole.load(path, group))
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    assert all(str(errors[0]) in str(error) for error in errors)
