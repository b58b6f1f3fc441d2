"""Links are measured, alike on all ranks; the cheapest algorithm is chosen; one that cannot run is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from argosy.comm.algorithms.catalogue import ALGORITHMS, suits
from argosy.comm.cost import simulate
from argosy.comm.measure import Pairs, measure
from argosy.comm.schedule import Collective
from argosy.comm.select import AlgorithmError, Choice, Selector, links_event, predict
from argosy.comm.topology import Curve, Link, Topology

FAST, SLOW = Link(2e-6, 8e9), Link(80e-6, 0.125e9)


class FakeLinks:
    """Links that take the time a model says, without spending it, and ranks that gather what they have."""

    def __init__(self, hosts: Sequence[int], slow_pair: tuple[int, int] | None = None) -> None:
        self.hosts, self.slow_pair = hosts, slow_pair
        self.swaps: list[tuple[int, int, int]] = []
        self.sizes: list[list[int]] = [[] for _ in hosts]
        self._meet = threading.Barrier(len(hosts), timeout=10)
        self._rows: list[list[float]] = [[] for _ in hosts]
        self._noise = 0

    def exchange(self, rank: int, peer: int | None, size_bytes: int) -> float:
        self.sizes[rank].append(size_bytes)
        if peer is None:
            return 0.0
        self.swaps.append((rank, peer, size_bytes))
        link = FAST if self.hosts[rank] == self.hosts[peer] else SLOW
        slower = 2.0 if self.slow_pair == (min(rank, peer), max(rank, peer)) else 1.0
        self._noise += 1
        noise = 1.5 if self._noise % 3 == 0 else 1.0
        return slower * noise * (link.latency_seconds + size_bytes / link.bytes_per_second)

    def gather(self, rank: int, values: list[float]) -> Sequence[Sequence[float]]:
        self._rows[rank] = values
        self._meet.wait()
        rows = list(self._rows)
        self._meet.wait()
        return rows

    def measured(self) -> Topology:
        def work(rank: int) -> Topology:
            return measure(
                rank,
                self.hosts,
                lambda peer, size: self.exchange(rank, peer, size),
                lambda size: 3e-6 + (rank + 1) * size / 1e10,
                lambda values: self.gather(rank, values),
            )

        with ThreadPoolExecutor(len(self.hosts)) as pool:
            (topology,) = set(pool.map(work, range(len(self.hosts)), timeout=30))
        return topology


def test_links_are_measured_alike_on_all_ranks() -> None:
    topology = FakeLinks([0, 0, 1, 1, 1]).measured()
    assert topology.hosts == (0, 0, 1, 1, 1)
    for measured, real in ((topology.inside, FAST), (topology.between, SLOW)):
        assert measured.latency_seconds == pytest.approx(real.latency_seconds, rel=0.1)
        assert measured.bytes_per_second == pytest.approx(real.bytes_per_second, rel=0.1)
    assert 1e8 < topology.reduce_bytes_per_second < 1e12
    assert topology.memory.seconds(32 << 20) == pytest.approx(3e-6 + 5 * (32 << 20) / 1e10)  # the last rank is slowest


def test_the_slowest_pair_counts() -> None:
    topology = FakeLinks([0, 0, 0, 0, 0], slow_pair=(2, 3)).measured()
    assert topology.inside.bytes_per_second == pytest.approx(FAST.bytes_per_second / 2, rel=0.1)


def test_partners_swap_the_same_sizes_with_each_other() -> None:
    links = FakeLinks([0, 1, 1, 0, 2])
    links.measured()
    for rank, peer in ((0, 3), (1, 2), (0, 1)):
        ours = [size for a, b, size in links.swaps if (a, b) == (rank, peer)]
        assert ours
        assert ours == [size for a, b, size in links.swaps if (a, b) == (peer, rank)]
    assert not any(4 in (a, b) for a, b, _ in links.swaps)  # of three hosts, the last one looks on
    assert all(sizes == links.sizes[0] for sizes in links.sizes)  # and calls when the others do


def test_measuring_takes_little_time() -> None:
    links = FakeLinks([0, 0, 1, 1])
    begin = time.monotonic()
    links.measured()
    spent = time.monotonic() - begin
    for rank in range(4):
        taken = sum(
            (FAST if links.hosts[a] == links.hosts[b] else SLOW).latency_seconds
            + size / (FAST if links.hosts[a] == links.hosts[b] else SLOW).bytes_per_second
            for a, b, size in links.swaps
            if a == rank
        )
        assert taken < 0.4
    assert spent < 5.0


def test_who_measures_with_whom() -> None:
    assert Pairs.of([0]) == Pairs((None,), (None,))
    assert Pairs.of([0, 1, 0, 1]) == Pairs((2, 3, 0, 1), (1, 0, None, None))
    assert Pairs.of([0, 1, 2]) == Pairs((None, None, None), (1, 0, None))


@pytest.mark.parametrize("ranks", [2, 3, 6, 8])
@pytest.mark.parametrize("collective", list(Collective))
def test_the_choice_is_the_cheapest_by_the_cost_model(collective: Collective, ranks: int) -> None:
    topology = Topology.uniform(ranks, 2, FAST, SLOW) if ranks > 2 else Topology.uniform(ranks, 1, FAST, SLOW)
    selector = Selector(topology)
    for size in (1, 1 << 10, 1 << 16, 1 << 20, 1 << 26):
        choice = selector.choose(collective, size)
        times = {
            name: predict(collective, name, topology, [max(size, 8)])[0]
            for name in ALGORITHMS[collective]
            if suits(name, collective, ranks)
        }
        assert choice.seconds == pytest.approx(min(times.values()))
        assert times[choice.name] == pytest.approx(choice.seconds)
        assert dict(choice.alternatives) == pytest.approx({n: t for n, t in times.items() if n != choice.name})
        assert [t for _, t in choice.alternatives] == sorted(t for _, t in choice.alternatives)
        assert not choice.forced


def test_what_happens_in_shared_memory_is_not_simulated() -> None:
    memory = Curve(((0.0, 1e-6), (1e6, 1e-4)))
    topology = replace(Topology.uniform(4, 2, FAST, SLOW), memory=memory)
    size = 8 << 20
    (hierarchical,) = predict(Collective.ALL_REDUCE, "hierarchical", topology, [size])
    across = size / SLOW.bytes_per_second  # of two hosts, each sends half twice
    assert hierarchical == pytest.approx(across + memory.seconds(size), rel=0.05)
    (flat,) = predict(Collective.ALL_REDUCE, "ring", topology, [size])
    assert flat == simulate(ALGORITHMS[Collective.ALL_REDUCE]["ring"](topology), topology, size)
    alone = Topology.uniform(4, 1, FAST, SLOW)
    (nobody_near,) = predict(Collective.ALL_REDUCE, "hierarchical", alone, [size])
    schedule = ALGORITHMS[Collective.ALL_REDUCE]["hierarchical"](alone)
    assert nobody_near == pytest.approx(simulate(schedule, alone, size))


def test_small_and_large_are_chosen_for_differently() -> None:
    selector = Selector(Topology.uniform(6, 1, FAST, SLOW))
    small, large = (selector.choose(Collective.ALL_REDUCE, size).name for size in (64, 64 << 20))
    assert small == "binary_blocks"  # few rounds
    assert large in ("ring", "hierarchical")  # few bytes; they are the same where nobody shares a host


def test_equal_topologies_choose_alike_and_sizes_have_classes() -> None:
    first, second = (Selector(Topology.uniform(6, 3, FAST, SLOW)) for _ in range(2))
    for size in range(1, 4000, 37):
        assert first.choose(Collective.ALL_REDUCE, size) == second.choose(Collective.ALL_REDUCE, size)
    assert first.choose(Collective.ALL_REDUCE, 1025) is first.choose(Collective.ALL_REDUCE, 2048)
    assert first.choose(Collective.ALL_REDUCE, 0).seconds > 0


def test_one_host_is_direct() -> None:
    selector = Selector(Topology.uniform(4, 4, FAST, SLOW))
    for collective in Collective:
        choice = selector.choose(collective, 1 << 20)
        assert choice.name == "direct"
        assert choice.seconds > 0
        assert set(dict(choice.alternatives)) == {name for name in ALGORITHMS[collective] if suits(name, collective, 4)}
    assert Selector(Topology.uniform(1)).choose(Collective.ALL_REDUCE, 100).name == "direct"


def test_an_algorithm_is_forced_where_there_is_one_of_its_name() -> None:
    selector = Selector(Topology.uniform(6, 3, FAST, SLOW), "ring")
    choice = selector.choose(Collective.ALL_REDUCE, 64)
    assert (choice.name, choice.forced) == ("ring", True)
    assert selector.choose(Collective.BROADCAST, 64).name == "tree"
    one_host = Selector(Topology.uniform(4, 4), "halving_doubling")
    assert one_host.choose(Collective.ALL_REDUCE, 64).name == "halving_doubling"
    assert one_host.choose(Collective.BROADCAST, 64).name == "direct"
    assert Selector(Topology.uniform(6), "halving_doubling").choose(Collective.ALL_GATHER, 64).name == "ring"


@pytest.mark.parametrize(
    ("collective", "name", "said"),
    [
        (Collective.ALL_REDUCE, "direct", "the ranks are on 2 hosts, and it needs them on one; choose auto, ring"),
        (Collective.ALL_GATHER, "halving_doubling", "a power of two, and there are 6 ranks; choose auto or ring"),
        (Collective.BROADCAST, "ring", "broadcast has no such algorithm; choose auto or tree"),
        (Collective.ALL_REDUCE, "rings", "there is no such algorithm; choose auto, ring"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(collective: Collective, name: str, said: str) -> None:
    topology = Topology.uniform(6, 3)
    with pytest.raises(AlgorithmError, match=f"^algorithm={name} cannot run {collective.value} here") as caught:
        Selector(topology).choose(collective, 64, name)
    assert said in str(caught.value)
    if collective is Collective.ALL_REDUCE:
        with pytest.raises(AlgorithmError):
            Selector(topology, name)


def test_events_tell_links_and_choices() -> None:
    choice = Choice("ring", 0.5, (("tree", 0.75),))
    assert choice.event(Collective.ALL_REDUCE, 64) == {
        "collective": "all_reduce",
        "bytes": 64,
        "algorithm": "ring",
        "predicted_seconds": 0.5,
        "alternatives": {"tree": 0.75},
        "forced": False,
    }
    assert links_event(Topology.uniform(2, 1, FAST, SLOW))["between_bytes_per_second"] == 0.125e9
