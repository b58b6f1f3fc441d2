"""A checkpoint on disk is whole or absent, and damage is found."""

import errno
import itertools
import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_harness import State, assert_same
from kept_states import read, write

from argosy.checkpoint import manifest, shard, storage
from argosy.checkpoint.errors import CheckpointError
from argosy.checkpoint.save import Saver
from argosy.checkpoint.steps import steps_in
from argosy.comm.group import SoloGroup

# Whole or absent.

OLD: dict[str, State] = {"model": {"w": torch.ones(3)}, "optimizer": {"lr": 0.1, "m": torch.zeros(3)}}
NEW: dict[str, State] = {"model": {"w": torch.full((3,), 2.0)}, "optimizer": {"lr": 0.2, "m": torch.ones(3)}}
OPERATIONS = {"fsync": os, "write": os, "rename": Path, "mkdir": Path, "rmtree": shutil}


class Killed(BaseException):
    """The process ends here: nothing handles it."""


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def interrupted(
    monkeypatch: pytest.MonkeyPatch, operation: str, failure: Callable[[], BaseException], save: Callable[[], None]
) -> Iterator[BaseException | None]:
    """What `save` raises when its first, second, ... call of an operation fails, half done."""
    owner: Any = OPERATIONS[operation]
    real = getattr(owner, operation)
    for number in itertools.count():
        calls = itertools.count()

        def fail(*arguments: Any, number: int = number, calls: Iterator[int] = calls, **options: Any) -> Any:
            if next(calls) != number:
                return real(*arguments, **options)
            if operation == "write":
                real(arguments[0], arguments[1][: len(arguments[1]) // 2])
            if operation == "rmtree" and options.get("ignore_errors") and isinstance(failure(), OSError):
                return None  # as rmtree does
            raise failure()

        raised: BaseException | None = None
        with monkeypatch.context() as patch:
            patch.setattr(owner, operation, fail)
            try:
                save()
            except (CheckpointError, Killed) as error:
                raised = error
        if raised is None and next(calls) <= number:
            assert number > 0, f"{operation} was never called"
            return
        yield raised


@pytest.mark.parametrize("step", [0, 1], ids=["the same step", "the next step"])
@pytest.mark.parametrize("failure", [full_disk, Killed], ids=["full disk", "killed"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_save_that_fails_at_any_point_leaves_a_whole_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, operation: str, failure: Callable[[], BaseException], step: int
) -> None:
    write(folder, OLD)
    if operation == "rmtree":
        (folder / "step-00000000").rename(folder / "step-00000000.replaced")
        write(folder, OLD, step=0)
    for error in interrupted(monkeypatch, operation, failure, lambda: write(folder, NEW, step=step, keep=1)):
        found = read(folder)
        replaced = found["optimizer"]["lr"] == 0.2
        assert_same(NEW if replaced else OLD, found)
        assert error is None or isinstance(error, Killed) or "still whole" in str(error)
        if isinstance(error, CheckpointError):
            assert not any(name.name.startswith(".") for name in folder.iterdir()), "it cleans up"
        shutil.rmtree(folder)
        write(folder, OLD)
        write(folder, OLD)
        assert [path.name for path in folder.iterdir()] == ["step-00000000"]


def test_what_a_killed_save_left_is_removed_by_the_next(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in interrupted(monkeypatch, "fsync", Killed, lambda: write(folder, NEW)):
        left = list(folder.glob(".aside-*"))
        write(folder, OLD)
        assert not any(path.exists() for path in left)
        assert sorted(path.name for path in folder.iterdir()) == ["step-00000000"]
        shutil.rmtree(folder)


@pytest.mark.parametrize("step", [0, 1], ids=["replaced", "no longer kept"])
def test_nobody_waits_for_the_deletion_of_an_older_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    write(folder, OLD)
    allowed, delete, saver = threading.Event(), shutil.rmtree, Saver(SoloGroup(), SoloGroup)
    monkeypatch.setattr(shutil, "rmtree", lambda *given, **more: allowed.wait(60) and delete(*given, **more))
    saver.save(folder, NEW, step=step, keep=1)
    assert steps_in(storage.storage_at(folder)) == [f"step-{step:08d}"]
    assert_same(NEW, read(folder))
    assert len(list(folder.glob(".aside-*"))) == 1, "out of sight, but there"
    allowed.set()
    saver.finish()
    assert [path.name for path in folder.iterdir()] == [f"step-{step:08d}"]


def test_the_replaced_checkpoint_counts_until_its_replacement_is_there(folder: Path) -> None:
    write(folder, OLD, step=5)
    (folder / "step-00000005").rename(folder / "step-00000005.replaced")  # and then the machine crashed
    assert_same(OLD, read(folder))
    assert_same(OLD, read(folder / "step-00000005"))
    write(folder, NEW, step=5)
    assert_same(NEW, read(folder))
    assert [path.name for path in folder.iterdir()] == ["step-00000005"]


def test_files_are_on_disk_before_the_folder_has_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str]] = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(("sync", os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)))
    monkeypatch.setattr(Path, "rename", lambda a, b: (done.append(("rename", a.name)), rename(a, b)))
    write(folder, OLD)
    renamed = next(number for number, (what, _) in enumerate(done) if what == "rename")
    synced = [Path(path).name for what, path in done[:renamed] if what == "sync"]
    assert synced[-3:] == ["rank0.safetensors", "manifest.json", done[renamed][1]]
    assert ("sync", str(folder)) in done[renamed:]
    assert ("sync", str(folder.parent)) in done[:renamed], "the folder itself was new"


def test_nothing_else_in_the_folder_is_touched(folder: Path) -> None:
    write(folder, OLD, keep=1)
    mine = [folder / name for name in ("notes.txt", ".mine.tmp", "model.safetensors")]
    for file in mine:
        file.write_text("mine")
    (folder / "step-x").mkdir()
    write(folder, NEW, step=1, keep=1)
    assert_same(NEW, read(folder))
    assert [file.read_text() for file in mine] == ["mine"] * 3
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000001", "step-x"]


def test_the_last_whole_ones_are_kept(folder: Path) -> None:
    for step in range(4):
        write(folder, OLD, step=step)
    (folder / "step-00000003" / "rank0.safetensors").write_bytes(b"damaged")
    write(folder, NEW, step=4, keep=2)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000003", "step-00000004"]
    write(folder, NEW, step=5, keep=2)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000004", "step-00000005"], "what is earlier goes"


def test_the_one_just_saved_is_kept_and_later_ones_are_told(folder: Path) -> None:
    write(folder, OLD, step=7)
    with pytest.warns(UserWarning, match="step-00000007 beside the step-00000003 that was saved now"):
        write(folder, NEW, step=3, keep=1)
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]


def test_a_path_that_cannot_hold_a_checkpoint_is_named(folder: Path) -> None:
    folder.write_text("a file of the user's")
    with pytest.raises(CheckpointError, match=str(folder)):
        write(folder, OLD)
    with pytest.raises(CheckpointError, match=str(folder)):
        read(folder)
    assert folder.read_text() == "a file of the user's"


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("net/step-00000004", {}, "give the folder that is to hold the steps"),
        ("net", {"step": -1}, "step=-1: expected"),
        ("net", {"step": 1.0}, "step=1.0: expected"),
        ("net", {"step": True}, "step=True: expected"),
        ("net", {"keep": 0}, "keep=0: expected"),
        ("", {}, "the path of a checkpoint is empty"),
        ("nosuch://net", {}, "nosuch://net cannot be reached"),
        (Path("s3://net"), {}, "give it as text"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path: Path, name: str | Path, options: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        write(name, OLD, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_path_without_a_checkpoint_is_named(folder: Path) -> None:
    for path in (folder, folder / "step-00000003"):
        with pytest.raises(CheckpointError, match=f"no checkpoint at {path}"):
            read(path)


def test_a_step_may_be_a_number_of_numpy(folder: Path) -> None:
    write(folder, OLD, step=np.int64(3), keep=np.int32(2))
    assert_same(OLD, read(folder / "step-00000003"))


def test_a_relative_path_is_where_it_was_when_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    begun = threading.Event()
    real = storage.Folder.begin
    monkeypatch.setattr(storage.Folder, "begin", lambda *given: (begun.wait(5), real(*given))[1])
    saver = Saver(SoloGroup(), SoloGroup)
    saver.save("net", OLD, step=0, wait=False)
    monkeypatch.chdir(tmp_path / "elsewhere")
    begun.set()
    saver.close()
    assert_same(OLD, read(tmp_path / "net"))


# Damage.


@pytest.fixture
def saved(folder: Path) -> Path:
    """Two checkpoints; the second will be damaged."""
    write(folder, OLD, step=1)
    write(folder, NEW, step=2)
    return folder


def newest(folder: Path) -> Path:
    return folder / "step-00000002"


def assert_refused(saved: Path, said: str) -> None:
    """The damaged one is refused by name; from the folder of both, the one before it is taken."""
    with pytest.raises(CheckpointError, match=said) as caught:
        read(newest(saved))
    assert str(newest(saved)) in str(caught.value)
    with pytest.warns(UserWarning, match=said) as warned:
        assert_same(OLD, read(saved))
    assert str(newest(saved)) in str(warned[0].message)
    shutil.rmtree(saved / "step-00000001")
    with pytest.warns(UserWarning, match=said), pytest.raises(CheckpointError, match=f"no whole .* {saved}: .*{said}"):
        read(saved)


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
    file = newest(saved) / "rank0.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert_refused(saved, "rank0.safetensors is damaged")


def test_a_missing_file_is_named(saved: Path) -> None:
    (newest(saved) / "rank0.safetensors").unlink()
    assert_refused(saved, "rank0.safetensors is missing")


def test_a_missing_manifest_is_named(saved: Path) -> None:
    (newest(saved) / "manifest.json").unlink()
    assert_refused(saved, "manifest.json is missing")


def piece(content: Any) -> Any:
    """The only piece of the model's tensor."""
    return content["tensors"]["model/w"]["pieces"][0]


EDITS: dict[str, Callable[[Any], Any]] = {
    "another format": lambda outer: outer.update(format="argosy-checkpoint-99"),
    "no format": lambda outer: outer.pop("format"),
    "no content": lambda outer: outer.pop("content"),
    "content in a list": lambda outer: outer.update(content=[]),
    "another learning rate": lambda outer: outer["content"]["parts"].update(optimizer={"dict": [["lr", 0.3]]}),
}
FORGED: dict[str, Callable[[Any], Any]] = {
    "no files": lambda content: content.pop("files"),
    "no step": lambda content: content.pop("step"),
    "something else": lambda content: content.update(more=1),
    "tensor is nothing": lambda content: content["tensors"].update({"model/w": None}),
    "file is not listed": lambda content: content["tensors"]["model/w"].update(pieces=[[[0], [3], "x", "model/w"]]),
    "unknown type": lambda content: content["tensors"]["model/w"].update(dtype="OBJECT"),
    "path upwards": lambda content: content["files"].update({"../x": {"size_bytes": 1, "sha256": ""}}),
    "step in words": lambda content: content.update(step="x"),
    "no worker": lambda content: content.update(world=0),
    "time in numbers": lambda content: content.update(saved=7),
    "versions in a list": lambda content: content.update(versions=[]),
    "size in words": lambda content: content["files"]["rank0.safetensors"].update(size_bytes="x"),
    "offsets of another rank": lambda content: piece(content).__setitem__(0, [0, 0]),
    "sizes of another rank": lambda content: piece(content).__setitem__(1, [3, 1]),
    "before the beginning": lambda content: piece(content).__setitem__(0, [-1]),
    "beyond the end": lambda content: piece(content).__setitem__(0, [1]),
    "a huge shape": lambda content: content["tensors"]["optimizer/m"].update(shape=[10**9, 10**9]),
    "a piece without a name": lambda content: piece(content).__setitem__(3, []),
    "a hole": lambda content: content["tensors"]["model/w"].update(shape=[4]),
    "a piece twice": lambda content: content["tensors"]["model/w"]["pieces"].append(piece(content)),
    "a part of nothing": lambda content: content["parts"].update(model={"list": []}),
    "path from the root": lambda content: content["files"].update({"/etc/passwd": {"size_bytes": 1, "sha256": ""}}),
}


@pytest.mark.parametrize("edit", [*EDITS, *FORGED])
def test_a_manifest_that_argosy_did_not_write_is_refused(saved: Path, edit: str) -> None:
    file = newest(saved) / "manifest.json"
    outer = json.loads(file.read_text())
    if edit in EDITS:
        EDITS[edit](outer)
    else:  # with a digest that is right
        FORGED[edit](outer["content"])
        outer["sha256"] = manifest._digest(outer["content"])
    file.write_text(json.dumps(outer))
    assert_refused(saved, r"manifest\.json")


@pytest.mark.parametrize(
    "change",
    [
        lambda content: piece(content).__setitem__(3, "model/nope"),
        lambda content: content["tensors"]["model/w"].update(dtype="I32"),
        lambda content: content["tensors"]["model/w"].update(dtype="F16"),
        lambda content: (content["tensors"]["model/w"].update(shape=[2]), piece(content).__setitem__(1, [2])),
    ],
    ids=["another name", "another type", "a smaller type", "another shape"],
)
def test_a_file_that_does_not_hold_what_the_manifest_says_is_refused(saved: Path, change: Callable[[Any], Any]) -> None:
    file = newest(saved) / "manifest.json"
    outer = json.loads(file.read_text())
    change(outer["content"])
    outer["sha256"] = manifest._digest(outer["content"])
    file.write_text(json.dumps(outer))
    assert_refused(saved, r"rank0\.safetensors does not hold model/.* as the manifest says")


@pytest.mark.parametrize(
    "form", [{"set": [1]}, {"list": [], "tuple": []}, {"dict": [[[], 1]]}, {"tensor": "model/v"}], ids=str
)
def test_a_form_that_argosy_did_not_write_is_refused(saved: Path, form: Any) -> None:
    file = newest(saved) / "manifest.json"
    outer = json.loads(file.read_text())
    outer["content"]["parts"]["model"] = form
    outer["sha256"] = manifest._digest(outer["content"])
    file.write_text(json.dumps(outer))
    assert_refused(saved, r"manifest\.json")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000], ids=lambda data: repr(data[:3])
)
def test_a_manifest_that_is_no_json_is_refused(saved: Path, content: bytes) -> None:
    (newest(saved) / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read(newest(saved))
    assert "\\x" not in str(caught.value), "what it says is in words"
    assert str(caught.value).count("use an earlier checkpoint") == 1
    assert_refused(saved, r"manifest\.json")


class Trap:
    """Unpickling it would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_is_refused_and_not_executed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trap = pickle.dumps(Trap(tmp_path / "executed"))
    monkeypatch.setattr(shard, "stream", lambda entries: iter([memoryview(trap)]))
    write(folder, OLD)
    with pytest.raises(CheckpointError, match=r"rank0\.safetensors is not a safetensors file"):
        read(folder / "step-00000000")
    assert not (tmp_path / "executed").exists()
