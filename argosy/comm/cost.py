"""The cost model: how long a schedule takes on a topology, from latency, bandwidth and speed of reduction.

Every rank has a clock. A transfer leaves when its source gets to it, and takes the link's latency plus its bytes over
the bandwidth that it gets; its target goes on when it has arrived and has been reduced. Transfers of one round that
share a link (a host's network link, or a rank's own turn inside a host) share its bandwidth. All transfers of a round
are computed at once, so that thousands of ranks take seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from argosy.comm.schedule import Ints, Round, Schedule
from argosy.comm.topology import Topology

Floats = npt.NDArray[np.float64]


def simulate(schedule: Schedule, topology: Topology, size_bytes: float) -> float:
    """Seconds until the last rank is done, for `size_bytes` of data on every rank (for all-gather: of the result)."""
    return float(simulate_sizes(schedule, topology, [size_bytes])[0])


def simulate_sizes(schedule: Schedule, topology: Topology, sizes_bytes: Sequence[float]) -> Floats:
    """The same for several sizes at once."""
    if schedule.ranks != topology.ranks:
        raise ValueError(f"the schedule has {schedule.ranks} ranks and the topology {topology.ranks}")
    slot_bytes = np.array(sizes_bytes, dtype=np.float64) / schedule.data_slots
    hosts = topology.host_array()
    clock = np.zeros((topology.ranks, len(slot_bytes)))
    flow: Flow | None = None
    for part in schedule.rounds:
        if flow is None or not flow.suits(part):
            flow = Flow(part, hosts, topology)
        clock = flow.after(clock, slot_bytes)
    return np.asarray(clock.max(axis=0, initial=0.0))


class Flow:
    """What a round costs whatever the time is. Rounds that differ only in which slots they move have the same."""

    def __init__(self, part: Round, hosts: Ints, topology: Topology) -> None:
        self._part = part
        self._once = [len(np.unique(end)) == part.size for end in (part.source, part.target)]
        self._seconds, self._latency = _wire(part, hosts, topology)
        reduced = np.bincount(part.target, part.width * part.reduce, minlength=topology.ranks)
        self._reducing = reduced[:, None] / topology.reduce_bytes_per_second

    def suits(self, part: Round) -> bool:
        """Whether a round is like the one this was made for; algorithms share the columns that do not change."""
        mine = self._part
        same = part.source is mine.source and part.target is mine.target
        return same and part.width is mine.width and part.reduce is mine.reduce

    def after(self, clock: Floats, slot_bytes: Floats) -> Floats:
        """The clocks after the round: one row for each rank, one column for each size."""
        sent = clock[self._part.source] + self._seconds * slot_bytes
        after = clock.copy()
        for rank, least, once in (
            (self._part.source, sent, self._once[0]),
            (self._part.target, sent + self._latency, self._once[1]),
        ):
            if once:
                after[rank] = np.maximum(after[rank], least)
            else:
                np.maximum.at(after, rank, least)
        after += self._reducing * slot_bytes
        return after


def _wire(part: Round, hosts: Ints, topology: Topology) -> tuple[Floats, Floats]:
    """For each transfer of a round: seconds for each byte of a slot on the links that it shares, and its latency."""
    outgoing, incoming = hosts[part.source], hosts[part.target]
    crosses, moves = outgoing != incoming, part.source != part.target
    # A rank moves its own bytes one after another; a host's link is shared by the transfers of all its ranks.
    by_rank = [np.bincount(end, part.width * ~crosses)[end] for end in (part.source, part.target)]
    by_host = [np.bincount(end, part.width * crosses)[end] for end in (outgoing, incoming)]
    inside, between = topology.inside, topology.between
    seconds = np.where(
        crosses,
        np.maximum(*by_host) / between.bytes_per_second,
        np.maximum(*by_rank) / inside.bytes_per_second,
    )
    latency = np.where(crosses, between.latency_seconds, inside.latency_seconds)
    return (seconds * moves)[:, None], (latency * moves)[:, None]


def bytes_sent(schedule: Schedule, topology: Topology, size_bytes: float) -> tuple[float, float]:
    """The most that any rank sends, and the most that any host sends to others."""
    hosts = topology.host_array()
    by_rank, by_host = np.zeros(topology.ranks), np.zeros(int(hosts.max(initial=0)) + 1)
    for part in schedule.rounds:
        size = part.width * (size_bytes / schedule.data_slots)
        np.add.at(by_rank, part.source, size * (part.source != part.target))
        np.add.at(by_host, hosts[part.source], size * (hosts[part.source] != hosts[part.target]))
    return float(by_rank.max(initial=0.0)), float(by_host.max(initial=0.0))
