"""Links and programs: every algorithm of the catalogue, run over sockets and over rings, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from links_harness import Kind, World, check_schedule_result, run_schedule

from argosy.comm.algorithms.catalogue import ALGORITHMS, suits
from argosy.comm.schedule import Collective, Schedule
from argosy.comm.topology import Topology

DTYPES = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "i32": np.int32, "i64": np.int64}
CASES = [(collective, name) for collective, by_name in ALGORITHMS.items() for name in by_name]
KINDS: list[Kind] = ["sockets", "rings"]


def schedules(collective: Collective, name: str, ranks: int) -> list[Schedule]:
    if not suits(name, collective, ranks):
        return []
    per_host = [1, 2, 3] if name == "hierarchical" else [1]
    return [ALGORITHMS[collective][name](Topology.uniform(ranks, per_host=hosts)) for hosts in per_host]


def inputs(ranks: int, count: int, dtype: str) -> list[np.ndarray]:
    """Small integers, so that sums are exact in every dtype and order."""
    random = np.random.default_rng(ranks * 1000 + count)
    return [random.integers(-9, 10, count).astype(DTYPES[dtype]) for _ in range(ranks)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("collective", "name"), CASES, ids=[f"{c.value}-{n}" for c, n in CASES])
def test_every_algorithm_in_worlds_of_1_to_8(collective: Collective, name: str, kind: Kind) -> None:
    for ranks in range(1, 9):
        world = World(ranks, kind, lanes=1 + ranks % 3)
        sequence = 0
        for schedule in schedules(collective, name, ranks):
            for count, dtype, chunk_bytes in [(0, "f32", 0), (5, "i64", 0), (4099, "f32", 1000), (3001, "f16", 4096)]:
                # All-to-all moves slots between halves of the buffer, so these must be of the same size.
                size = count // (2 * ranks) * 2 * ranks if collective is Collective.ALL_TO_ALL else count
                before = inputs(ranks, size, dtype)
                after = [values.copy() for values in before]
                sequence += 1
                run_schedule(world, schedule, after, dtype, sequence=sequence, chunk_bytes=chunk_bytes)
                check_schedule_result(schedule, before, after)
        world.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ALGORITHMS[Collective.ALL_REDUCE])
@pytest.mark.parametrize("op", ["sum", "min", "prod"])
def test_all_ranks_get_the_same_bits(name: str, kind: Kind, op: str) -> None:
    for ranks in (3, 6, 8):
        world = World(ranks, kind, lanes=3)
        schedule = ALGORITHMS[Collective.ALL_REDUCE][name](Topology.uniform(ranks, per_host=2))
        first: np.ndarray | None = None
        for sequence in range(3):
            random = np.random.default_rng(3)
            buffers = [random.standard_normal(20_011).astype(np.float32) for _ in range(ranks)]
            run_schedule(world, schedule, buffers, "f32", op, sequence, chunk_bytes=4096)
            first = buffers[0] if first is None else first
            for buffer in buffers:
                np.testing.assert_array_equal(buffer.view(np.int32), first.view(np.int32))
        world.close()


@pytest.mark.parametrize("lanes", [1, 4])
def test_messages_of_megabytes(lanes: int) -> None:
    for kind in KINDS:
        world = World(4, kind, lanes)
        for sequence, name in enumerate(ALGORITHMS[Collective.ALL_REDUCE]):
            schedule = ALGORITHMS[Collective.ALL_REDUCE][name](Topology.uniform(4, per_host=2))
            before = inputs(4, 1_000_003, "f32")
            after = [values.copy() for values in before]
            run_schedule(world, schedule, after, "f32", sequence=sequence)
            check_schedule_result(schedule, before, after)
        world.close()


def test_a_larger_world() -> None:
    ranks = 24
    world = World(ranks, "sockets", lanes=2)
    for sequence, (collective, name) in enumerate(CASES):
        for schedule in schedules(collective, name, ranks):
            before = inputs(ranks, 48 * 101, "i32")
            after = [values.copy() for values in before]
            run_schedule(world, schedule, after, "i32", sequence=sequence)
            check_schedule_result(schedule, before, after)
    world.close()
