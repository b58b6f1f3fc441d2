"""What the links of a group can do, measured when it starts: well under a second, and the same answer on every rank.

Ranks swap bytes in pairs: neighbours on a host, all pairs of the job at once, as a collective would; and one rank of
each host with one of the next, as a host has one link to the network. Noise only ever adds time, so a pair counts with
its best; of all pairs the slowest counts, because a collective waits for it. Every number that a decision stands on is
gathered from all ranks first: they decide alike, how much to measure and what came out.

A swap of n bytes takes `latency + n / bytes_per_second`; a short one gives the first, a long one then the second. What
ranks of a host do in memory that they share depends on where in the caches it lies: a few sizes of it are timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from argosy._native import reduce
from argosy.comm.topology import Curve, Link, Topology

Exchange = Callable[[int | None, int], float]
"""`exchange(peer, size_bytes)` swaps bytes with a peer and returns the seconds it took. All ranks call it at the same
time with the same size; one without a peer has nothing to do in it."""
ReduceInside = Callable[[int], float]
"""`reduce_inside(size_bytes)` all-reduces among the ranks of each host, in shared memory; the seconds it took."""
Gather = Callable[[list[float]], Sequence[Sequence[float]]]
"""`gather(values)` gives every rank the values of all ranks, by rank; all give the same number of them."""

SHORT_BYTES: Final = 64
_PROBE_BYTES: Final = 64 << 10
_MAX_BYTES: Final = 16 << 20
_LONG_SECONDS: Final = 0.02  # long enough to outlast the burst that a shaped link lets through
_SHORT_SECONDS: Final = 0.02
_MAX_SHORT: Final = 100
_LONG_TIMES: Final = 3
_REDUCE_BYTES: Final = 1 << 20
_MEMORY: Final = ((64, 20), (64 << 10, 20), (1 << 20, 20), (4 << 20, 10), (16 << 20, 5))  # bytes, and how often
_NEVER: Final = 0.0


@dataclass(frozen=True)
class Pairs:
    """Who measures with whom: the peer of each rank inside its host and between hosts, or None."""

    inside: tuple[int | None, ...]
    between: tuple[int | None, ...]

    @classmethod
    def of(cls, hosts: Sequence[int]) -> Pairs:
        """Neighbours on each host; the first ranks of neighbouring hosts. Of an odd number the last one looks on.

        >>> Pairs.of([0, 0, 0, 1, 1])
        Pairs(inside=(1, 0, None, 4, 3), between=(3, None, None, 0, None))
        """
        members = Topology(tuple(hosts)).members()
        inside = [pair for ranks in members for pair in zip(ranks[::2], ranks[1::2], strict=False)]
        leaders = [ranks[0] for ranks in members]
        between = list(zip(leaders[::2], leaders[1::2], strict=False))
        return cls(_peers(inside, len(hosts)), _peers(between, len(hosts)))


def measure(
    rank: int, hosts: Sequence[int], exchange: Exchange, reduce_inside: ReduceInside, gather: Gather
) -> Topology:
    """Time the links and the reduction; every rank calls this at the same time, and gets the same topology.

    `hosts` has the number of each rank's host. A link that no pair has keeps the default of `Topology`.
    """
    pairs = Pairs.of(hosts)
    plain = Topology(tuple(hosts))
    reduce_seconds = _reduce_seconds()
    gather([_NEVER])  # a barrier: all begin together
    inside = _link(pairs.inside[rank], any(p is not None for p in pairs.inside), exchange, gather)
    between = _link(pairs.between[rank], any(p is not None for p in pairs.between), exchange, gather)
    memory = _memory(reduce_inside, gather) if inside is not None else plain.memory
    (slowest,) = _slowest(gather([reduce_seconds]))
    return Topology(plain.hosts, inside or plain.inside, between or plain.between, _REDUCE_BYTES / slowest, memory)


def _link(peer: int | None, anybody: bool, exchange: Exchange, gather: Gather) -> Link | None:
    """One kind of link, measured by the ranks that have a peer on it; the others take part in the gathering."""
    if not anybody:
        return None

    def best(times: int, size_bytes: int) -> float:
        seconds = min(exchange(peer, size_bytes) for _ in range(times))
        return _NEVER if peer is None else seconds

    best(1, SHORT_BYTES)  # the first one pays for pages and connections
    short, probe = _slowest(gather([best(2, SHORT_BYTES), best(1, _PROBE_BYTES)]))
    # From numbers that all ranks have: how often and how much to swap without taking long.
    times = int(np.clip(_SHORT_SECONDS / short, 2, _MAX_SHORT))
    rate = _PROBE_BYTES / max(probe - short, 1e-9)
    long_bytes = int(np.clip(rate * _LONG_SECONDS, _PROBE_BYTES, _MAX_BYTES)) & ~63
    latency, long = _slowest(gather([best(times, SHORT_BYTES), best(_LONG_TIMES, long_bytes)]))
    return Link(latency, long_bytes / max(long - latency, 1e-9))


def _memory(reduce_inside: ReduceInside, gather: Gather) -> Curve:
    seconds = []
    for size_bytes, times in _MEMORY:
        for _ in range(2):
            reduce_inside(size_bytes)  # pages are made, and found by all
        seconds.append(float(np.median([reduce_inside(size_bytes) for _ in range(times)])))
    slowest = np.array(_slowest(gather(seconds)))
    rising = np.minimum.accumulate(slowest[::-1])[::-1]  # more bytes never take less: what looks like it is noise
    return Curve(tuple((float(size), float(took)) for (size, _), took in zip(_MEMORY, rising, strict=True)))


def _slowest(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The largest of each value; ranks that looked on gave `_NEVER`, which is less than all others."""
    return tuple(max(max(column), 1e-9) for column in zip(*rows, strict=True))


def _reduce_seconds() -> float:
    """How long this process takes to reduce a buffer into another one."""
    count = _REDUCE_BYTES // 4
    ours, theirs = np.ones(count, np.float32), np.zeros(count, np.float32)
    addresses = [int(ours.ctypes.data), int(theirs.ctypes.data)]
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        reduce("sum", "f32", addresses[0], addresses, count)
        times.append(time.perf_counter() - begin)
    return max(float(np.median(times)), 1e-9)


def _peers(pairs: list[tuple[int, int]], ranks: int) -> tuple[int | None, ...]:
    peers: list[int | None] = [None] * ranks
    for one, other in pairs:
        peers[one], peers[other] = other, one
    return tuple(peers)
