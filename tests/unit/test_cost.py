"""The cost model gives the closed formulas where there are some, and sees shared links."""

from __future__ import annotations

import functools
import math

import pytest

from argosy.comm import cost
from argosy.comm.algorithms import halving_doubling, hierarchical, ring, tree
from argosy.comm.cost import simulate, simulate_sizes
from argosy.comm.schedule import Collective, Schedule, transfers
from argosy.comm.topology import Link, Topology

ALPHA, BETA, GAMMA, SIZE = 20e-6, 1e9, 4e9, 64e6


def cluster(ranks: int, per_host: int = 1) -> Topology:
    return Topology.uniform(ranks, per_host, Link(1e-6, 8e9), Link(ALPHA, BETA), GAMMA)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_times_are_those_of_the_textbook(ranks: int) -> None:
    topology, rounds = cluster(ranks), math.log2(ranks)
    part = SIZE * (ranks - 1) / ranks
    simulate = functools.partial(cost.simulate, pipelined=False)
    assert simulate(ring.all_reduce(topology), topology, SIZE) == pytest.approx(
        2 * (ranks - 1) * ALPHA + 2 * part / BETA + part / GAMMA
    )
    assert simulate(halving_doubling.all_reduce(topology), topology, SIZE) == pytest.approx(
        2 * rounds * ALPHA + 2 * part / BETA + part / GAMMA
    )
    assert simulate(tree.all_reduce(topology), topology, SIZE) == pytest.approx(
        2 * rounds * (ALPHA + SIZE / BETA) + rounds * SIZE / GAMMA
    )


def test_4096_ranks_can_be_simulated() -> None:
    topology = cluster(4096)
    expected = 2 * 4095 * ALPHA + SIZE * 4095 / 4096 * (2 / BETA + 1 / GAMMA)
    assert simulate(ring.all_reduce(topology), topology, SIZE, pipelined=False) == pytest.approx(expected)


def test_a_chain_of_whole_messages_takes_little_longer_than_one_if_chunks_are_passed_on() -> None:
    topology, link = cluster(8), ALPHA + SIZE / BETA
    whole, chunked = (simulate(tree.broadcast(topology), topology, SIZE, pipelined=way) for way in (False, True))
    assert whole == pytest.approx(3 * link)
    # Rank 0 sends to three others, one after the other; whoever passes it on is a few chunks behind.
    assert 3 * SIZE / BETA <= chunked < whole
    chain = Schedule(
        "chain",
        Collective.BROADCAST,
        3,
        1,
        [transfers([0], [1], 0, reduce=False), transfers([1], [2], 0, reduce=False)],
    )
    assert simulate(chain, cluster(3), SIZE) == pytest.approx(SIZE / BETA, rel=0.01)


def test_several_sizes_are_the_same_as_one_by_one() -> None:
    topology = cluster(12, per_host=4)
    schedule = hierarchical.all_reduce(topology)
    sizes = [1e3, 1e6, 1e9]
    assert simulate_sizes(schedule, topology, sizes).tolist() == [simulate(schedule, topology, size) for size in sizes]


def test_ranks_of_a_host_share_its_link() -> None:
    one, four = cluster(2, per_host=1), cluster(8, per_host=4)
    alone = simulate(halving_doubling.all_reduce(one), one, SIZE)
    shared = simulate(halving_doubling.all_reduce(four), four, SIZE)
    assert shared > 3.5 * alone  # four ranks of each host exchange half the data each, over the same link


def test_hierarchical_beats_halving_and_doubling_where_links_are_shared() -> None:
    topology = cluster(32, per_host=8)
    times = [simulate(make.all_reduce(topology), topology, SIZE) for make in (hierarchical, halving_doubling)]
    assert times[0] < times[1] / 3


def test_little_data_is_a_matter_of_rounds() -> None:
    topology = cluster(64)
    assert simulate(tree.all_reduce(topology), topology, 8) < simulate(ring.all_reduce(topology), topology, 8) / 8


def test_one_rank_takes_no_time() -> None:
    topology = cluster(1)
    assert simulate(ring.all_reduce(topology), topology, SIZE) == 0.0


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="the schedule has 4 ranks and the topology 8"):
        simulate(ring.all_reduce(cluster(4)), cluster(8), SIZE)
