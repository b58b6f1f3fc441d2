"""Workers save and load together: all of them return, or all raise the same error; with or without a shared disk."""

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_harness import STRANGE, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_states import read, write
from torch import Tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard, _StridedShard

from argosy.checkpoint.agree import patiently
from argosy.checkpoint.boxes import Box, boxes_of, tile, whole
from argosy.checkpoint.errors import CheckpointError
from argosy.checkpoint.export import export
from argosy.checkpoint.pieces import held
from argosy.checkpoint.plan import plan
from argosy.checkpoint.save import Saver
from argosy.comm.group import SoloGroup
from argosy.comm.pending import DONE, Pending

WORLD = 3


class Threads(SoloGroup):
    """Members that are threads of this process. The real groups have tests of their own."""

    timeout_seconds = 2.0

    def __init__(self, rank: int, size: int, meet: threading.Barrier, table: dict[Any, Tensor]) -> None:
        self.rank, self.size, self._meet, self._table = rank, size, meet, table

    def _swap(self, key: Any, tensor: Tensor | None) -> None:
        if tensor is not None:
            self._table[key] = tensor.clone()
        self._meet.wait()

    def broadcast(self, tensor: Tensor, root: int = 0, *, wait: bool = True) -> Pending:
        self._swap("sent", tensor if self.rank == root else None)
        tensor.copy_(self._table["sent"])
        return self.barrier()

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        self._swap(self.rank, tensor)
        gathered = [self._table[rank].clone() for rank in range(self.size)]
        self.barrier()
        return gathered

    def barrier(self, *, wait: bool = True) -> Pending:
        self._meet.wait()
        return DONE

    def send(self, tensor: Tensor, to: int) -> None:
        with self._meet._cond:  # type: ignore[attr-defined]
            self._table.setdefault(("message", self.rank, to), []).append(tensor.clone())  # type: ignore[arg-type]

    def receive(self, tensor: Tensor, source: int) -> None:
        for _ in range(2000):
            with self._meet._cond:  # type: ignore[attr-defined]
                if waiting := self._table.get(("message", source, self.rank)):
                    tensor.copy_(waiting.pop(0))  # type: ignore[attr-defined]
                    return
            threading.Event().wait(0.001)
        raise TimeoutError(f"{self.rank} has nothing from {source}")


def on_all_workers(work: Callable[[Threads], Any], patience_seconds: float = 5) -> list[Any]:
    """What each worker returns or raises."""
    size = WORLD
    meet, table, results = threading.Barrier(size, timeout=patience_seconds), {}, [None] * size

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


LARGE = torch.arange(9_000_000, dtype=torch.float32).reshape(3000, 3000)
STATE = {"model": {f"{number}": tensor for number, tensor in enumerate(STRANGE.values())}, "lr": {"a": 0.5}}
SEES = {
    "all see the folder": (True, True, True),
    "one does not": (True, False, True),
    "one host each": (True, False, False),
}


@pytest.mark.parametrize("sees", SEES.values(), ids=SEES.keys())
def test_every_worker_writes_and_loads_whether_it_sees_the_folder_or_not(
    folder: Path, tmp_path: Path, sees: tuple[bool, ...]
) -> None:
    def place(rank: int) -> Path:
        return folder if sees[rank] else tmp_path / "elsewhere" / str(rank)

    state = {**STATE, "large": {"w": LARGE}}
    saved = on_all_workers(lambda group: write(place(group.rank), state, group))
    assert saved == [None] * 3, saved
    assert [path.name for path in tmp_path.iterdir()] == ["net"], "one copy is written"
    files = sorted((folder / "step-00000000").glob("*.safetensors"))
    assert [file.name for file in files] == ["rank0.safetensors", "rank1.safetensors", "rank2.safetensors"]
    sizes = [file.stat().st_size for file in files]
    assert max(sizes) < 1.5 * min(sizes), "replicas share the writing"
    for loaded in on_all_workers(lambda group: read(place(group.rank), group)):
        assert_same(state, loaded)
    assert_same(state, read(folder))  # on one worker


def test_workers_that_hold_different_keys_make_one_checkpoint(folder: Path) -> None:
    def work(group: Threads) -> None:
        mine = {f"layer{group.rank}": torch.full((2,), float(group.rank)), "tied": torch.ones(3)}
        write(folder, {"model": mine, "count": {"seen": {f"by {group.rank}": group.rank}}}, group)

    assert on_all_workers(work) == [None] * 3
    loaded = read(folder)
    assert list(loaded["model"]) == ["layer0", "tied", "layer1", "layer2"]
    assert loaded["count"] == {"seen": {"by 0": 0, "by 1": 1, "by 2": 2}}


def test_all_workers_refuse_what_one_cannot_save(folder: Path) -> None:
    def work(group: Threads) -> None:
        write(folder, {"model": {"rule": len if group.rank == 1 else 0.1}}, group)

    errors = on_all_workers(work)
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    assert {str(error) for error in errors} == {str(errors[0])}
    assert str(errors[0]).startswith("rank 1: model/rule is a builtin")


def test_workers_that_hold_another_shape_are_named(folder: Path) -> None:
    errors = on_all_workers(lambda group: write(folder, {"model": {"w": torch.ones(group.rank // 2 + 1)}}, group))
    assert {str(error) for error in errors} == {"model/w is F32 [2] on rank 2, and F32 [1] on others"}


@pytest.mark.parametrize("blind", [False, True])
def test_all_workers_hear_of_a_disk_that_is_full_on_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blind: bool
) -> None:
    from argosy.checkpoint import storage

    write(folder, STATE, step=1)
    real, written = storage._File.write, itertools.count()

    def fail(file: Any, data: memoryview) -> None:
        if len(data) > 4096 and next(written) == 2:
            raise OSError(28, "No space left on device")
        real(file, data)

    monkeypatch.setattr(storage._File, "write", fail)
    state = {"model": {"w": LARGE}}
    place = lambda rank: tmp_path / "elsewhere" / str(rank) if blind and rank else folder  # noqa: E731
    errors = on_all_workers(lambda group: write(place(group.rank), state, group, step=2))
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    assert "No space left on device" in str(errors[0])
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    assert_same(STATE, read(folder))


@pytest.mark.parametrize("kind", ["missing", "damaged"])
def test_all_workers_refuse_what_one_cannot_load(folder: Path, kind: str) -> None:
    if kind == "damaged":
        on_all_workers(lambda group: write(folder, STATE, group))
        (folder / "step-00000000" / "rank0.safetensors").write_bytes(b"damaged")
    errors = on_all_workers(lambda group: read(folder / "step-00000000", group))
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    assert len({str(error) for error in errors}) == 1


def test_work_that_takes_longer_than_the_group_waits_is_waited_for() -> None:
    """The members wait for each other for 1.5 seconds at most, and hear of each other every half of one."""

    def work(group: Threads) -> list[Any]:
        return patiently(group, lambda: threading.Event().wait(2.5 if group.rank == 1 else 0) or group.rank)

    assert on_all_workers(work, patience_seconds=1.5) == [[0, 1, 2]] * 3


def test_a_model_is_exported_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(8, 4), torch.nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("count", torch.tensor(3))

    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(Path(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)))
    model = Tied()
    path = tmp_path / "out" / "net.safetensors"
    assert on_all_workers(lambda group: export(path, model, group)) == [None] * 3
    loaded = load_file(path)
    assert_same(loaded, {"count": model.count, "embed.weight": model.embed.weight.detach()})
    assert [each.name for each in path.parent.iterdir()] == ["net.safetensors"]
    assert {path.parent, tmp_path} <= set(synced), "the names are on the disk, too"
    with pytest.raises(CheckpointError, match="s3://net is a URL"):
        export("s3://net", model, SoloGroup())
    (tmp_path / "file").write_text("")
    errors = on_all_workers(lambda group: export(tmp_path / "file" / "net", model, group))
    assert all("could not be written" in str(error) for error in errors), errors


# In the background.


def test_a_save_in_the_background_holds_what_was_there_when_it_began(folder: Path) -> None:
    def work(group: Threads) -> None:
        second = on_second[group.rank]
        saver = Saver(group, lambda: second)
        tensor = torch.zeros(500_000)
        for step in range(3):
            tensor.fill_(step)
            saver.save(folder, {"model": {"w": tensor}, "step": {"n": step}}, step=step, wait=False, keep=2)
            tensor.fill_(-1)
        saver.close()

    meet, table = threading.Barrier(WORLD, timeout=5), {}
    on_second = [Threads(rank, WORLD, meet, table) for rank in range(WORLD)]
    assert on_all_workers(work) == [None] * 3
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]
    for step in (1, 2):
        loaded = read(folder / f"step-0000000{step}")
        assert loaded["step"] == {"n": step}
        assert torch.equal(loaded["model"]["w"], torch.full((500_000,), float(step)))


def test_the_error_of_a_save_in_the_background_comes_when_it_is_waited_for(folder: Path) -> None:
    saver = Saver(SoloGroup(), SoloGroup)
    folder.write_text("in the way")
    saver.save(folder, STATE, step=0, wait=False)
    with pytest.raises(CheckpointError, match="could not be written"):
        saver.save(folder, STATE, step=1)
    folder.unlink()
    saver.save(folder, STATE, step=2, wait=False)
    saver.close()
    assert_same(STATE, read(folder))


# Somewhere else.


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_a_url_holds_checkpoints_too(tmp_path: Path, protocol: str) -> None:
    url = f"{protocol}://{tmp_path}/net"
    old, new = {"model": {"w": torch.ones(3)}}, {"model": {"w": torch.zeros(3)}}
    for step in range(3):
        write(url, old, step=step, keep=2)
    assert_same(old, read(f"{url}/step-00000001"))
    write(url, new, step=2)
    assert_same(new, read(url))
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        read(f"{url}/step-00000000")
    import fsspec

    system = fsspec.filesystem(protocol)
    names = sorted(Path(name).name for name in system.ls(f"{tmp_path}/net/step-00000002", detail=False))
    assert len(names) == 2, "what the replaced one named is gone"
    system.rm_file(f"{tmp_path}/net/step-00000002/manifest.json")
    assert_same(old, read(url))  # without a manifest it does not exist
    shard = next(name for name in system.ls(f"{tmp_path}/net/step-00000001", detail=False) if "rank0" in name)
    system.pipe_file(shard, system.cat_file(shard)[:-1])
    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(CheckpointError, match="no whole checkpoint"):
        read(url)


def test_ranks_that_do_not_share_a_store_send_what_they_hold() -> None:
    """The memory of a process is its own: here the URLs differ."""
    place = "memory://shared/{}".format
    assert on_all_workers(lambda group: write(place(group.rank), STATE, group)) == [None] * 3
    for loaded in on_all_workers(lambda group: read(place(group.rank), group)):
        assert_same(STATE, loaded)


# Placements.


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    size=st.integers(0, 23),
    mesh=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    kinds=st.lists(st.tuples(st.sampled_from("rss-"), st.integers(1, 3)), min_size=3, max_size=3),
)
def test_runs_are_what_torch_gives_each_rank(size: int, mesh: list[int], kinds: list[tuple[str, int]]) -> None:
    made: dict[str, Callable[[int], Placement]] = {
        "r": lambda _: Replicate(),
        "s": lambda _: Shard(0),
        "-": lambda factor: _StridedShard(0, split_factor=factor),
    }
    placements = [made[kind](factor) for (kind, factor), _ in zip(kinds, mesh, strict=False)]
    for coordinate in itertools.product(*(range(ways) for ways in mesh)):
        indices = torch.arange(size)
        for ways, number, placement in zip(mesh, coordinate, placements, strict=True):
            if isinstance(placement, (Shard, _StridedShard)):
                indices = placement._split_tensor(indices, ways, with_padding=False)[0][number]
        (runs,) = held((size,), mesh, coordinate, placements, outer_last=False)
        assert [index for begin, end in runs for index in range(begin, end)] == indices.tolist()


def test_boxes_of_uneven_meshes_cover_a_tensor_once() -> None:
    shape, mesh = (9, 5), (4, 2)
    covered = torch.zeros(shape, dtype=torch.int)
    for coordinate in itertools.product(range(4), range(2)):  # as FSDP2 cuts what tensor parallelism has cut
        runs = held(shape, mesh, coordinate, [_StridedShard(0, split_factor=2), Shard(0)])
        for box, _ in boxes_of(runs):
            covered[box.within(whole(shape))] += 1
    assert torch.equal(covered, torch.ones(shape, dtype=torch.int))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    cuts=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    change=st.tuples(st.sampled_from(["none", "less", "twice", "moved"]), st.integers(0, 99)),
)
def test_boxes_tile_if_each_element_is_in_one(shape: list[int], cuts: list[int], change: tuple[str, int]) -> None:
    boxes = [whole(shape)] if 0 not in shape else []
    for count in cuts:
        boxes = [part for box in boxes for part in box.split(count)]
    what, number = change
    if boxes and what != "none":
        box = boxes.pop(number % len(boxes))
        if what == "twice":
            boxes += [box, box]
        if what == "moved":
            boxes.append(Box(tuple(0 for _ in shape), box.sizes))
    covered = torch.zeros(shape, dtype=torch.int)
    for box in boxes:
        covered[box.within(whole(shape))] += 1
    assert tile(boxes, shape) == bool((covered == 1).all())


def test_what_ranks_hold_in_other_forms_is_the_lowest_ones(folder: Path) -> None:
    def work(group: Threads) -> None:
        write(folder, {"rest": {"seen": [torch.full((2,), float(group.rank))] * (group.rank + 1)}}, group)

    assert on_all_workers(work) == [None] * 3
    assert_same(read(folder), {"rest": {"seen": [torch.zeros(2)]}})


def test_a_tensor_that_is_not_reduced_yet_is_refused() -> None:
    with pytest.raises(CheckpointError, match="model/w is placed as P"):
        held((4,), (2,), (0,), [Partial()], where="model/w")


def test_a_tensor_of_which_a_part_is_missing_is_named() -> None:
    described = [["model/w", "F32", [4], [[[0], [2]]]]]
    with pytest.raises(CheckpointError, match="model/w: the parts that the ranks hold have 2 elements in all"):
        plan([described], lambda _: False)


def test_of_workers_that_differ_the_lowest_is_written(folder: Path) -> None:
    def work(group: Threads) -> None:
        state = {str(number): torch.full((3000,), float(group.rank)) for number in range(6)}
        write(folder, {"optimizer": state}, group, lowest_only=("optimizer",))

    assert on_all_workers(work) == [None] * 3
    assert {float(tensor.mean()) for tensor in read(folder)["optimizer"].values()} == {0.0}


def test_a_pair_of_splits_is_a_name_apart() -> None:
    """Keys with a slash, a number and a text that looks like one."""
    state = {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}, "#1": torch.tensor(3), 1: torch.tensor(4)}
    names = SimpleNamespace(found={})
    from argosy.checkpoint import tree

    tree.split(state, names.found, "x")
    assert list(names.found) == ["x/a~1b", "x/a/b", "x/~21", "x/#1"]
