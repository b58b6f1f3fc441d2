"""Every operation of the engine's group, on one host and between hosts, against what it should compute."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Place, run
from torch import Tensor

from argosy.comm.engine import EngineGroup

COUNTS = (0, 1, 7, 1000, 100_003, 700_001)  # the last is in several chunks
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
MOVED = (torch.bool, torch.complex64, torch.float8_e5m2)


def given(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """What a rank brings: small whole numbers, so that sums are exact in any type and order."""
    return (torch.arange(count) % 5 + rank).to(dtype)


def total(parts: list[Tensor]) -> Tensor:
    return torch.stack([part.to(torch.float64) for part in parts]).sum(0).to(parts[0].dtype)


def check_collectives(group: EngineGroup, count: int, dtype: torch.dtype) -> None:
    rank, size = group.rank, group.size
    everything = [given(r, count, dtype) for r in range(size)]
    mine = everything[rank]
    for op, expected in (("sum", total(everything)), ("min", everything[0]), ("max", everything[-1])):
        tensor = mine.clone()
        group.all_reduce(tensor, op)
        assert torch.equal(tensor, expected), op
    assert torch.equal(torch.stack(group.all_gather(mine)), torch.stack(everything))
    out = torch.empty_like(mine)
    group.reduce_scatter(out, torch.cat([given(rank + part, count, dtype) for part in range(size)]))
    assert torch.equal(out, total([given(r + rank, count, dtype) for r in range(size)]))
    for root in {0, size - 1}:
        tensor = mine.clone()
        group.broadcast(tensor, root)
        assert torch.equal(tensor, everything[root])
        tensor = mine.clone()
        group.reduce(tensor, root)
        assert torch.equal(tensor, total(everything) if rank == root else mine)
        gathered = torch.empty(size * count, dtype=dtype) if rank == root else None
        group.gather(gathered, mine, root)
        assert gathered is None or torch.equal(gathered, torch.cat(everything))
        group.scatter(out, torch.cat(everything) if rank == root else None, root)
        assert torch.equal(out, mine)


def check_all_to_all(group: EngineGroup, count: int, dtype: torch.dtype) -> None:
    rank, size = group.rank, group.size
    out = torch.empty(size * count, dtype=dtype)
    group.all_to_all(out, torch.cat([given(rank * size + to, count, dtype) for to in range(size)]))
    assert torch.equal(out, torch.cat([given(source * size + rank, count, dtype) for source in range(size)]))
    splits = [(rank + other) % 3 * count // 2 for other in range(size)]
    out = torch.empty(sum(splits), dtype=dtype)
    sent = torch.cat([given(rank * size + to, part, dtype) for to, part in enumerate(splits)])
    group.all_to_all(out, sent, splits, splits)
    assert torch.equal(out, torch.cat([given(s * size + rank, part, dtype) for s, part in enumerate(splits)]))


def check_messages(group: EngineGroup, count: int, dtype: torch.dtype) -> None:
    rank, size = group.rank, group.size
    after, before = (rank + 1) % size, (rank - 1) % size
    sends = [group.send(given(rank + tag, count, dtype), after, tag, wait=False) for tag in (1, 2)]
    got = {tag: torch.empty(count, dtype=dtype) for tag in (1, 2)}
    second = group.receive(got[2], None, 2, wait=False)  # asked for in another order than sent
    first = group.receive(got[1], before, 1)
    second.wait()
    for pending in (*sends, first):
        pending.wait()
    assert first.source == second.source == before
    for tag, tensor in got.items():
        assert torch.equal(tensor, given(before + tag, count, dtype))


def check_started(group: EngineGroup, count: int, dtype: torch.dtype) -> None:
    """Operations that are started end in any order of waiting, beside ones that are not."""
    size = group.size
    tensors = [given(group.rank + number, count, dtype) for number in range(6)]
    pending = [group.all_reduce(tensor, wait=False) for tensor in tensors[:5]]
    group.all_reduce(tensors[5])
    for number in (3, 0, 4, 1, 2):
        pending[number].wait()
        assert pending[number].done()
    for number, tensor in enumerate(tensors):
        assert torch.equal(tensor, total([given(r + number, count, dtype) for r in range(size)]))


def check_shared(group: EngineGroup) -> None:
    for count in (1, 5000, 300_001):
        tensor = group.empty(count)
        assert not tensor.any()
        tensor.fill_(group.rank + 1)
        group.all_reduce(tensor)
        assert tensor.eq(group.size * (group.size + 1) / 2).all()
        group.all_reduce(tensor, "avg")
        assert tensor.eq(group.size * (group.size + 1) / 2).all()
    assert group.empty(3, 0).shape == (3, 0)
    # One rank's tensor is shared, the others' are not.
    tensor = group.empty(50_000) if group.rank == 0 else torch.empty(50_000)
    tensor.fill_(2)
    group.all_reduce(tensor, "prod")
    assert tensor.eq(2**group.size).all()


def check_parts_of_shared(group: EngineGroup) -> None:
    """What is reduced stands in shared memory, on all ranks or on some; the result elsewhere, or in its own part."""
    rank, size, count = group.rank, group.size, 100_003
    expected = sum(given(other + rank, count, torch.float32) for other in range(size))
    mine = torch.cat([given(rank + part, count, torch.float32) for part in range(size)])
    shared = group.empty(size * count)
    for source in (shared, shared if rank else mine, mine):
        for inside in (False, True):
            source.copy_(torch.cat([given(rank + part, count, torch.float32) for part in range(size)]))
            before = source.clone()
            out = source[rank * count : (rank + 1) * count] if inside else torch.empty(count)
            group.reduce_scatter(out, source)
            assert torch.equal(out, expected)
            if not inside:
                assert torch.equal(source, before)
    memory = (ctypes.c_float * size).from_address(group.common(4 * size))
    memory[rank] = 1.0 + rank
    group.barrier()
    assert list(memory) == [1.0 + other for other in range(size)]
    group.barrier()


def check_bits(group: EngineGroup) -> None:
    """All ranks end with the same bits, whatever the numbers."""
    torch.manual_seed(group.rank)
    for count, dtype in itertools.product((33, 200_001), (torch.float32, torch.bfloat16)):
        tensor = torch.randn(count).to(dtype)
        exact = torch.stack([part.double() for part in group.all_gather(tensor)]).sum(0)
        group.all_reduce(tensor)
        assert torch.allclose(tensor.double(), exact, rtol=2e-2, atol=5e-2)
        assert all(torch.equal(tensor, other) for other in group.all_gather(tensor))


def around_the_caches(place: Place) -> None:
    """What ranks do where they share no cache, and where only some of them think so."""
    group = place.join()
    for around in (True, group.rank % 2 == 0):
        group._engine.write_around(around)
        for count in (3001, 100_003, 700_001):
            check_collectives(group, count, torch.float32)
            check_all_to_all(group, count, torch.uint8)
        check_bits(group)
    group.close()


def test_writes_around_the_caches_are_seen_by_all() -> None:
    run(around_the_caches, 3)


def everything(place: Place, algorithm: str, dtypes: tuple[torch.dtype, ...]) -> tuple[int, ...]:
    group = place.join(algorithm=algorithm)
    for count, dtype in itertools.product(COUNTS, dtypes):
        check_collectives(group, count, dtype)
        check_all_to_all(group, count, dtype)
        if group.size > 1:
            check_messages(group, count, dtype)
    for count in COUNTS:
        check_started(group, count, torch.float32)
    for dtype in MOVED:
        tensor = given(group.rank, 1000, torch.float32).to(dtype)
        group.broadcast(tensor)
        assert torch.equal(tensor.view(torch.uint8), given(0, 1000, torch.float32).to(dtype).view(torch.uint8))
    check_shared(group)
    if group.on_one_host and algorithm == "auto":
        check_parts_of_shared(group)
    check_bits(group)
    group.barrier()
    group.close()
    return group.hosts


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_on_one_host(size: int) -> None:
    assert run(everything, size, "auto", DTYPES) == [(0,) * size] * size


@pytest.mark.parametrize(("size", "algorithm"), [(2, "ring"), (3, "halving_doubling"), (4, "tree")])
def test_forced_algorithms_on_one_host(size: int, algorithm: str) -> None:
    run(everything, size, algorithm, DTYPES[:2])


@pytest.mark.parametrize(
    ("hosts", "algorithm"),
    [
        ("ab", "auto"),
        ("aab", "hierarchical"),
        ("abab", "hierarchical"),
        ("aab", "ring"),
        ("abc", "binary_blocks"),
        ("aabb", "tree"),
        ("abcd", "halving_doubling"),
    ],
)
def test_between_hosts(hosts: str, algorithm: str) -> None:
    numbers = tuple(sorted(set(hosts)).index(host) for host in hosts)
    assert run(everything, len(hosts), algorithm, DTYPES[:2], hosts=hosts) == [numbers] * len(hosts)


def subgroups(place: Place) -> list[float]:
    whole = place.join("whole")
    half = place.join(f"half {place.rank % 2}", ranks=range(place.rank % 2, place.size, 2))
    tensor, part = torch.full((10,), float(place.rank)), torch.full((10,), float(place.rank))
    whole.all_reduce(tensor)
    half.all_reduce(part)
    half.close()
    whole.all_reduce(tensor, "max")
    whole.close()
    return [tensor[0].item(), part[0].item()]


def test_groups_of_some_ranks() -> None:
    assert run(subgroups, 4) == [[6, 2], [6, 4], [6, 2], [6, 4]]


def shared_memory_comes_back(place: Place) -> bool:
    group = place.join()
    for _ in range(8):
        group.empty(1 << 24).fill_(1)  # 64 MiB
    status = Path("/proc/self/status").read_text()
    held_kbytes = int(status.partition("RssShmem:")[2].split()[0])
    assert held_kbytes < 64 << 10, f"{held_kbytes} kB are still there"
    kept = group.empty(10).fill_(7)
    group.close()
    del group
    return bool(kept.eq(7).all())


def test_shared_memory_comes_back_with_its_tensor_and_outlives_the_group() -> None:
    assert run(shared_memory_comes_back, 1) == [True]


def fork_and_go_on(place: Place) -> bool:
    """A forked child (of a DataLoader, say) drops its copies of everything; its parent must not notice."""
    group = place.join()
    tensor = group.empty(100_000).fill_(1)
    child = os.fork()
    if child == 0:
        del tensor, group
        os._exit(0)
    os.waitpid(child, 0)
    group.all_reduce(tensor)
    group.close()
    return bool(tensor.eq(place.size).all())


def test_a_forked_child_leaves_the_group_alone() -> None:
    assert run(fork_and_go_on, 2) == [True, True]


def threads(place: Place) -> bool:
    """Started operations of one thread and messages of another go on side by side."""
    group = place.join()
    peer, failed = 1 - place.rank, []

    def talk() -> None:
        for number in range(200):
            tensor = torch.full((100,), number)
            if place.rank == 0:
                group.send(tensor, peer)
            else:
                group.receive(tensor, peer)
            if not tensor.eq(number).all():
                failed.append(number)

    thread = threading.Thread(target=talk)
    thread.start()
    for _ in range(200):
        tensor = torch.ones(1000)
        group.all_reduce(tensor, wait=False).wait()
        if not tensor.eq(2).all():
            failed.append("all_reduce")
    thread.join()
    group.close()
    return not failed


def test_messages_and_collectives_from_two_threads() -> None:
    assert run(threads, 2) == [True, True]


def refused(place: Place) -> dict[str, str]:
    group = place.join()
    attempts: dict[str, Any] = {
        "strided": lambda: group.all_reduce(torch.zeros(4, 4).t()),
        "bool": lambda: group.all_reduce(torch.zeros(4, dtype=torch.bool)),
        "bits": lambda: group.all_reduce(torch.zeros(4), "bxor"),
        "op": lambda: group.all_reduce(torch.zeros(4), "mean"),  # type: ignore[arg-type]
        "root": lambda: group.broadcast(torch.zeros(4), 7),
        "out": lambda: group.all_gather_into(torch.zeros(4), torch.zeros(4)),
        "splits": lambda: group.all_to_all(torch.zeros(4), torch.zeros(4), [1, 1], [2, 2]),
        "myself": lambda: group.send(torch.zeros(4), place.rank),
    }
    told = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except ValueError as error:
            told[name] = str(error)
    group.all_reduce(torch.zeros(4))  # none of it has hurt the group
    group.close()
    return told


def test_wrong_arguments_are_refused_before_anything_is_sent() -> None:
    for rank, told in enumerate(run(refused, 2)):
        assert "contiguous" in told["strided"]
        assert "torch.bool cannot be reduced" in told["bool"]
        assert "whole numbers" in told["bits"]
        assert "'mean'" in told["op"]
        assert "sum, avg, min" in told["op"]
        assert "rank 7 is not in this group of 2" in told["root"]
        assert "must have 8" in told["out"]
        assert "[1, 1]" in told["splits"]
        assert f"rank {rank} is no peer" in told["myself"]
