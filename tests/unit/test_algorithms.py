"""Every algorithm is proved for many numbers of ranks, and needs the rounds and bytes that the documents promise."""

from __future__ import annotations

import gc
import math
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from argosy.comm.algorithms import binary_blocks, hierarchical
from argosy.comm.algorithms.catalogue import ALGORITHMS, suits
from argosy.comm.cost import bytes_sent
from argosy.comm.draw import svg
from argosy.comm.schedule import Collective
from argosy.comm.topology import Topology
from argosy.comm.verify import verify

DOCS = Path(__file__).parents[2] / "docs" / "algorithms"
EVERY = [(collective, name) for collective, named in ALGORITHMS.items() for name in named]
IDS = [f"{collective.value}-{name}" for collective, name in EVERY]


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    """Millions of steps are alive at once: looking through them for garbage takes longer than the proof."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(("collective", "name"), EVERY, ids=IDS)
def test_an_algorithm_is_right_for_small_worlds(collective: Collective, name: str) -> None:
    for ranks in [*range(1, 65), 96]:
        if suits(name, collective, ranks):
            verify(ALGORITHMS[collective][name](Topology.uniform(ranks)))


# These are the same for any number of ranks, and have millions of steps with 1,000.
LARGE = [(*one, ranks) for one in EVERY for ranks in (600, 1000) if ranks == 600 or one[1] not in ("ring", "pairwise")]


@pytest.mark.parametrize(("collective", "name", "ranks"), LARGE, ids=lambda value: getattr(value, "value", str(value)))
def test_an_algorithm_is_right_for_large_worlds(collective: Collective, name: str, ranks: int) -> None:
    if suits(name, collective, ranks):
        verify(ALGORITHMS[collective][name](Topology.uniform(ranks, per_host=8)))
    else:
        with pytest.raises(ValueError, match="power of two"):
            ALGORITHMS[collective][name](Topology.uniform(ranks))


@pytest.mark.parametrize("per_host", [2, 3, 8, 64])
def test_hierarchical_is_right_however_ranks_lie_on_hosts(per_host: int) -> None:
    for ranks in range(1, 65):
        verify(hierarchical.all_reduce(Topology.uniform(ranks, per_host)))
    verify(hierarchical.all_reduce(Topology((0, 1, 0, 2, 1, 0, 0))))  # dealt out of order, and unevenly


@pytest.mark.parametrize("root", [0, 1, 6])
@pytest.mark.parametrize("collective", [Collective.BROADCAST, Collective.REDUCE])
def test_any_rank_can_be_the_root(collective: Collective, root: int) -> None:
    verify(ALGORITHMS[collective]["tree"](Topology.uniform(7), root=root))  # type: ignore[call-arg]


def test_600_ranks_are_four_blocks() -> None:
    assert [len(block) for block in binary_blocks.blocks(600)] == [512, 64, 16, 8]


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize(
    ("name", "rounds", "sent"),
    [
        ("ring", lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n),
        ("halving_doubling", lambda n: 2 * math.log2(n), lambda n: 2 * (n - 1) / n),
        ("binary_blocks", lambda n: 2 * math.log2(n), lambda n: 2 * (n - 1) / n),
        ("tree", lambda n: 2 * math.log2(n), math.log2),
    ],
)
def test_rounds_and_bytes_are_as_documented(name, rounds, sent, ranks: int) -> None:
    topology = Topology.uniform(ranks)
    schedule = ALGORITHMS[Collective.ALL_REDUCE][name](topology)
    assert len(schedule.rounds) == rounds(ranks)
    assert bytes_sent(schedule, topology, 1.0)[0] == pytest.approx(sent(ranks))


@pytest.mark.parametrize(
    ("collective", "name", "sent"),
    [
        (Collective.REDUCE_SCATTER, "ring", 7 / 8),
        (Collective.REDUCE_SCATTER, "halving_doubling", 7 / 8),
        (Collective.ALL_GATHER, "ring", 7 / 8),
        (Collective.ALL_GATHER, "halving_doubling", 7 / 8),
        (Collective.BROADCAST, "tree", 3),
        (Collective.REDUCE, "tree", 1),
        (Collective.ALL_TO_ALL, "pairwise", 7 / 8),
    ],
)
def test_the_other_collectives_send_as_documented(collective: Collective, name: str, sent: float) -> None:
    topology = Topology.uniform(8)
    assert bytes_sent(ALGORITHMS[collective][name](topology), topology, 1.0)[0] == pytest.approx(sent)


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 2), (4, 8), (3, 5)])
def test_hierarchical_sends_over_the_network_what_one_rank_a_host_would(hosts: int, per_host: int) -> None:
    ranks = hosts * per_host
    topology = Topology.uniform(ranks, per_host)
    schedule = hierarchical.all_reduce(topology)
    by_rank, by_host = bytes_sent(schedule, topology, 1.0)
    assert len(schedule.rounds) == 2 * (per_host - 1) + 2 * (hosts - 1)
    assert by_host == pytest.approx(2 * (hosts - 1) / hosts)
    assert by_rank == pytest.approx(2 * (per_host - 1) / per_host + 2 * (hosts - 1) / ranks)


@pytest.mark.parametrize("ranks", [3, 7, 11, 100, 600, 1023])
def test_binary_blocks_never_sends_four_times_the_data(ranks: int) -> None:
    topology = Topology.uniform(ranks)
    schedule = binary_blocks.all_reduce(topology)
    blocks = binary_blocks.blocks(ranks)
    assert len(schedule.rounds) == 2 * (math.log2(len(blocks[0])) + len(blocks) - 1)
    assert bytes_sent(schedule, topology, 1.0)[0] < 4.0


def test_pictures_in_the_documents_are_those_of_the_schedules() -> None:
    pictures = runpy.run_path(str(DOCS / "draw.py"))["PICTURES"]
    assert {file.stem for file in DOCS.glob("*.svg")} == set(pictures)
    for name, schedule in pictures.items():
        verify(schedule)
        assert (DOCS / f"{name}.svg").read_text() == svg(schedule), f"run docs/algorithms/draw.py: {name} has changed"
