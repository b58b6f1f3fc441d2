"""Checkpoints: what was saved comes back bit for bit, or an error says why; never anything else."""

import errno
import itertools
import json
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader

from argosy.checkpoint import files, tree, whole
from argosy.checkpoint.files import CheckpointError
from argosy.checkpoint.roles import roles
from argosy.comm.group import SoloGroup
from argosy.data.batches import BatchConfig
from argosy.data.cursor import Cursor
from argosy.data.loader import Loader

State = dict[str, Any]


def assert_same(ours: Any, theirs: Any) -> None:
    """The same values of the same types, tensors bit for bit."""
    if isinstance(ours, Tensor):
        assert isinstance(theirs, Tensor)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        torch.testing.assert_close(ours.detach(), theirs, rtol=0, atol=0, equal_nan=True)
    elif isinstance(ours, dict):
        assert isinstance(theirs, dict)
        assert [(type(key), key) for key in ours] == [(type(key), key) for key in theirs]
        for key in ours:
            assert_same(ours[key], theirs[key])
    elif isinstance(ours, (list, tuple)):
        assert type(ours) is type(theirs)
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other)
    else:
        assert type(ours) is type(theirs)
        assert repr(ours) == repr(theirs)  # so that NaN is NaN, and -0.0 is not 0.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "net"


def again(folder: Path, state: Any) -> Any:
    files.write(folder, {"model": state})
    return files.read(folder)["model"]


# What comes back.


def values(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text(max_size=3) | st.integers()
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(keys, inner, max_size=3)
        ),
        max_leaves=12,
    )


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
TENSORS = st.integers(0, 5).map(torch.arange)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(value=values(PLAIN | TENSORS))
def test_any_nested_values_are_taken_apart_and_joined(value: Any) -> None:
    tensors: dict[str, Tensor] = {}
    form = json.loads(json.dumps(tree.split(value, tensors, "")))
    assert_same(value, tree.join(form, tree.storable(tensors)))


base = torch.arange(24.0).reshape(4, 6)
complex_base = torch.complex(base, base + 1)
STRANGE = {
    "transposed": base.t(),
    "every other": base[::2, 1::3],
    "a view of a part": base[1:3],
    "expanded": torch.arange(3.0).expand(5, 3),
    "a number": torch.tensor(2.5),
    "a number of many": base[1, 2],
    "empty": torch.empty(0, 3),
    "bool": base > 5,
    "bfloat16": base.to(torch.bfloat16),
    "float16": base.to(torch.float16),
    "float64": base.double() / 3,
    "int64": torch.tensor([-(2**63), 2**63 - 1]),
    "uint8": base.to(torch.uint8),
    "not finite": torch.tensor([float("nan"), float("inf"), -0.0]),
    "complex": complex_base,
    "conjugate": complex_base.conj(),
    "imaginary part of a conjugate": complex_base.conj().imag,
    "needs a gradient": base.clone().requires_grad_(),
}


@pytest.mark.parametrize("tensor", STRANGE.values(), ids=STRANGE.keys())
def test_any_tensor_comes_back_bit_for_bit(folder: Path, tensor: Tensor) -> None:
    assert_same(tensor, again(folder, {"x": tensor})["x"])


def test_tensors_that_share_memory_come_back_each_for_itself(folder: Path) -> None:
    state = {"all": base, "row": base[0], "flat": base.view(-1), "again": base, "none": base[:0], "nothing": base[4:]}
    assert_same(state, again(folder, state))


def test_keys_that_look_alike_are_told_apart(folder: Path) -> None:
    state = {
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2), "b'": torch.tensor(3)},
        "a.b'": torch.tensor(4),
        "1": torch.tensor(5),
        1: torch.tensor(6),
        "": {"": torch.tensor(7)},
        ".": torch.tensor(8),
        "__metadata__": torch.tensor(9),
    }
    assert_same(state, again(folder, state))


class Tied(nn.Module):
    """Input and output embeddings are one and the same, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(x)))


def test_training_continues_as_if_it_had_not_stopped(folder: Path) -> None:
    class Training:
        def __init__(self) -> None:
            self.model = Tied()
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
            self.scheduler = schedulers.OneCycleLR(self.optimizer, max_lr=0.2, total_steps=40)
            script = DataLoader(range(8), batch_size=3, shuffle=True)
            self.loader = Loader(script, BatchConfig(), workers=1, rank=0, cursor=Cursor())
            self.parts = roles((self.model, self.optimizer, self.scheduler, self.loader))

        def epoch(self) -> None:
            for x in self.loader:
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(x), (x + 1) % 8).backward()
                self.optimizer.step()
                self.scheduler.step()

        def states(self) -> State:
            return {role: part.state_dict() for role, part in self.parts.items()}

    earlier, later = Training(), Training()
    earlier.epoch()
    earlier.epoch()
    whole.save(folder, earlier.states(), SoloGroup())
    for role, state in whole.load(folder, SoloGroup()).items():
        later.parts[role].load_state_dict(state)
    assert_same(earlier.states(), later.states())
    assert later.model.head.weight is later.model.embed.weight
    earlier.epoch()
    later.epoch()
    assert_same(earlier.states(), later.states())


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: schedulers.StepLR(optimizer, 2),
    "multi step": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 4, 6]),
    "cosine": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 9),
    "cyclic": lambda optimizer: schedulers.CyclicLR(optimizer, 0.1, 0.2, 3),
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "sequence": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.LinearLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)], [4]
    ),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_schedulers_continue(folder: Path, make: Callable[[Any], Any]) -> None:
    def start() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        return optimizer, make(optimizer)

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any) -> Iterator[float]:
        for _ in range(5):
            optimizer.step()
            scheduler.step()
            yield optimizer.param_groups[0]["lr"]

    earlier, later = start(), start()
    list(rates(*earlier))
    files.write(folder, {"optimizer": earlier[0].state_dict(), "scheduler": earlier[1].state_dict()})
    for part, state in zip(later, files.read(folder).values(), strict=True):
        part.load_state_dict(state)
    assert list(rates(*later)) == list(rates(*earlier))


# What is refused.


@pytest.mark.parametrize(
    "value",
    [len, lambda: None, object(), {1, 2}, b"bytes", 1j, np.ones(2), np.int64(3), torch.float32, Path("x")],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_data_is_refused_where_it_stands(folder: Path, value: object) -> None:
    files.write(folder, {"model": {"lr": 1}})
    with pytest.raises((TypeError, CheckpointError), match=rf"groups\.0\.rule.*{type(value).__name__}"):
        files.write(folder, {"model": {"lr": 2}, "optimizer": {"groups": [{"rule": value}]}})
    assert files.read(folder) == {"model": {"lr": 1}}


@pytest.mark.parametrize("state", [len, {"rule": len}, {len: 1}], ids=["itself", "in it", "as a key"])
def test_the_object_that_cannot_be_saved_is_named(folder: Path, state: Any) -> None:
    with pytest.raises((TypeError, CheckpointError), match="optimizer"):
        files.write(folder, {"model": {"lr": 1}, "optimizer": state})


@pytest.mark.parametrize("key", [(1, 2), None, 1.5, True], ids=repr)
def test_keys_other_than_text_and_whole_numbers_are_refused(folder: Path, key: Any) -> None:
    with pytest.raises((TypeError, CheckpointError)) as caught:
        again(folder, {"inner": {key: 1}})
    assert "inner" in str(caught.value)
    assert f"the key {key!r}" in str(caught.value)


def test_objects_are_named_for_what_they_are() -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, plateau = schedulers.StepLR(optimizer, 1), schedulers.ReduceLROnPlateau(optimizer)
    loader = Loader(DataLoader(range(3)), BatchConfig(), workers=1, rank=0, cursor=Cursor())
    named = roles((loader, model, scheduler, other, optimizer, plateau))
    assert named == {
        "loader": loader,
        "model": model,
        "model2": other,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scheduler2": plateau,
    }


def test_other_objects_have_no_name_in_a_checkpoint() -> None:
    with pytest.raises(TypeError, match="not dict"):
        roles((nn.Linear(1, 1), {}))
    with pytest.raises(TypeError, match=r"fleet\.save"):
        roles(())


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
