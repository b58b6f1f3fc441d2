"""Which algorithm runs a collective of a given size: the one that the cost model finds cheapest on the measured links.

The choice is a function of the topology, on which all ranks agree (`measure.py`), and of nothing else: ranks that chose
differently would wait for each other for ever. Sizes are taken in classes, powers of two, and all classes of a
collective are simulated at once, when the first of them is asked for.

Where all ranks share a host there is `direct`: rank r reduces slice r out of everybody's memory, and nothing travels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from argosy.comm.algorithms.catalogue import ALGORITHMS, suits
from argosy.comm.cost import simulate_sizes
from argosy.comm.plans import DIRECT
from argosy.comm.schedule import Collective
from argosy.comm.topology import Topology

AUTO: Final = "auto"
HIERARCHICAL: Final = "hierarchical"
_MIN_POWER, _MAX_POWER = 3, 40


class AlgorithmError(ValueError):
    """An algorithm that was asked for by name and cannot run here: why, and which can."""


@dataclass(frozen=True)
class Choice:
    """An algorithm, what it is predicted to take, and what the others would have, cheapest first."""

    name: str
    seconds: float
    alternatives: tuple[tuple[str, float], ...] = ()
    forced: bool = False

    def event(self, collective: Collective, size_bytes: int) -> dict[str, Any]:
        """The fields of an `algorithm` event."""
        return {
            "collective": collective.value,
            "bytes": size_bytes,
            "algorithm": self.name,
            "predicted_seconds": self.seconds,
            "alternatives": dict(self.alternatives),
            "forced": self.forced,
        }


class Selector:
    """Chooses algorithms for one group.

    >>> selector = Selector(Topology.uniform(ranks=8, per_host=4))
    >>> selector.choose(Collective.ALL_REDUCE, 64 << 20).name
    'hierarchical'
    >>> selector.choose(Collective.ALL_REDUCE, 64, "direct")
    Traceback (most recent call last):
        ...
    argosy.comm.select.AlgorithmError: algorithm=direct cannot run all_reduce here: the ranks are on 2 hosts, and it \
needs them on one; choose auto, ring, halving_doubling, binary_blocks, tree or hierarchical
    """

    def __init__(self, topology: Topology, algorithm: str = AUTO) -> None:
        """`algorithm` is used for whatever collective has one of this name; it must be able to run all-reduce here."""
        self.topology = topology
        self._algorithm = algorithm
        self._tables: dict[Collective, dict[str, list[float]]] = {}
        self._choices: dict[tuple[Collective, int, str], Choice] = {}
        if algorithm != AUTO:
            self._check(algorithm, Collective.ALL_REDUCE)

    def choose(self, collective: Collective, size_bytes: int, algorithm: str | None = None) -> Choice:
        """The algorithm for `size_bytes` of data on each rank; one that is named here must be able to run it."""
        power = min(max(math.ceil(math.log2(max(size_bytes, 1))), _MIN_POWER), _MAX_POWER)
        wanted = algorithm if algorithm is not None else self._algorithm
        key = (collective, power, wanted)
        found = self._choices.get(key)
        if found is None:
            if wanted != AUTO and (algorithm is not None or wanted in self.names(collective)):
                self._check(wanted, collective)
            else:
                wanted = AUTO
            found = self._choices[key] = self._decide(collective, power, wanted)
        return found

    def names(self, collective: Collective) -> list[str]:
        """The algorithms that can run a collective here."""
        direct = [DIRECT] if self._hosts() == 1 else []
        return direct + [name for name in ALGORITHMS[collective] if suits(name, collective, self.topology.ranks)]

    def _decide(self, collective: Collective, power: int, wanted: str) -> Choice:
        table = self._table(collective)
        times = {name: seconds[power - _MIN_POWER] for name, seconds in table.items()}
        # Equal times go by the order of the catalogue: everybody has the same.
        ranked = sorted(times, key=lambda name: times[name])
        cheapest = DIRECT if DIRECT in times else ranked[0]
        name = cheapest if wanted == AUTO else wanted
        others = tuple((other, times[other]) for other in ranked if other != name)
        return Choice(name, times[name], others, forced=wanted != AUTO)

    def _table(self, collective: Collective) -> dict[str, list[float]]:
        table = self._tables.get(collective)
        if table is None:
            sizes = [2.0**power for power in range(_MIN_POWER, _MAX_POWER + 1)]
            table = self._tables[collective] = {
                name: predict(collective, name, self.topology, sizes) for name in self.names(collective)
            }
        return table

    def _check(self, name: str, collective: Collective) -> None:
        names = self.names(collective)
        if name in names:
            return
        if name == DIRECT:
            reason = f"the ranks are on {self._hosts()} hosts, and it needs them on one"
        elif name in ALGORITHMS[collective]:
            reason = f"it needs a power of two, and there are {self.topology.ranks} ranks"
        elif any(name in algorithms for algorithms in ALGORITHMS.values()):
            reason = f"{collective.value} has no such algorithm"
        else:
            reason = "there is no such algorithm"
        *most, last = [AUTO, *names]
        raise AlgorithmError(
            f"algorithm={name} cannot run {collective.value} here: {reason}; choose {', '.join(most)} or {last}"
        )

    def _hosts(self) -> int:
        return len(set(self.topology.hosts))


def predict(collective: Collective, name: str, topology: Topology, sizes_bytes: Sequence[float]) -> list[float]:
    """The seconds that an algorithm takes for each size, as the engine runs it.

    Inside hosts, `direct` and `hierarchical` work in shared memory: that is not simulated, its times are measured.
    """
    if name == DIRECT:
        return [_in_memory(collective, topology, size) for size in sizes_bytes]
    schedule = ALGORITHMS[collective][name](topology)
    if name != HIERARCHICAL:
        return list(map(float, simulate_sizes(schedule, topology, sizes_bytes)))
    hosts = topology.host_array()
    between = [part for part in schedule.rounds if (hosts[part.source] != hosts[part.target]).all()]
    across = simulate_sizes(replace(schedule, rounds=between), topology, sizes_bytes)
    shared = max(len(members) for members in topology.members()) > 1
    inside = [_in_memory(collective, topology, size) if shared else 0.0 for size in sizes_bytes]
    return [float(one) + other for one, other in zip(across, inside, strict=True)]


def _in_memory(collective: Collective, topology: Topology, size_bytes: float) -> float:
    """An all-reduce reads and writes all of the data; the other collectives do about half of that."""
    if topology.ranks == 1:
        return 0.0
    part = 1.0 if collective is Collective.ALL_REDUCE else 0.5
    return topology.memory.seconds(size_bytes * part)


def links_event(topology: Topology) -> dict[str, Any]:
    """The fields of a `links` event: what was measured when the group began."""
    return {
        "hosts": list(topology.hosts),
        "inside_latency_seconds": topology.inside.latency_seconds,
        "inside_bytes_per_second": topology.inside.bytes_per_second,
        "between_latency_seconds": topology.between.latency_seconds,
        "between_bytes_per_second": topology.between.bytes_per_second,
        "reduce_bytes_per_second": topology.reduce_bytes_per_second,
        "memory_seconds": [list(point) for point in topology.memory.points],
    }
