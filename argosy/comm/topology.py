"""The topology: which ranks share a host, and what the links between them can do."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from argosy.comm.schedule import Ints


@dataclass(frozen=True)
class Link:
    """A connection: the time until the first byte arrives, and how many follow each second."""

    latency_seconds: float
    bytes_per_second: float

    @classmethod
    def ethernet(cls, gbits: float, latency_seconds: float = 30e-6) -> Link:
        """A network link as it is sold, in gigabits per second."""
        return cls(latency_seconds, gbits * 1e9 / 8)


@dataclass(frozen=True)
class Curve:
    """Times for some sizes, in rising order of them; in between, and beyond the last, they lie on straight lines.

    >>> curve = Curve(((0.0, 1.0), (100.0, 2.0), (200.0, 4.0)))
    >>> [curve.seconds(size_bytes) for size_bytes in (0, 50, 150, 300)]
    [1.0, 1.5, 3.0, 6.0]
    """

    points: tuple[tuple[float, float], ...]

    def seconds(self, size_bytes: float) -> float:
        """The time for a size."""
        (before, earlier), (last, latest) = self.points[-2:]
        if size_bytes > last:
            return latest + (size_bytes - last) * max(latest - earlier, 0.0) / (last - before)
        sizes, times = np.array(self.points).T
        return float(np.interp(size_bytes, sizes, times))


@dataclass(frozen=True)
class Topology:
    """Ranks on hosts. Ranks of one host talk over `inside`; ranks of two hosts over the hosts' own links, `between`.

    A host has one link to the network: the transfers of its ranks share it, each direction by itself. `memory` is the
    time of an all-reduce among the ranks of a host in memory that they share, where nothing is transferred.

    >>> Topology.uniform(ranks=6, per_host=4).hosts
    (0, 0, 0, 0, 1, 1)
    """

    hosts: tuple[int, ...]
    inside: Link = field(default_factory=lambda: Link(1e-6, 5e9))
    between: Link = field(default_factory=lambda: Link.ethernet(10))
    reduce_bytes_per_second: float = 10e9
    memory: Curve = Curve(((0.0, 2e-6), (1e6, 100e-6)))

    @classmethod
    def uniform(
        cls,
        ranks: int,
        per_host: int = 1,
        inside: Link | None = None,
        between: Link | None = None,
        reduce_bytes_per_second: float = 10e9,
    ) -> Topology:
        """Ranks dealt to hosts in order, `per_host` to each."""
        plain = cls(tuple(rank // per_host for rank in range(ranks)))
        return cls(plain.hosts, inside or plain.inside, between or plain.between, reduce_bytes_per_second)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.hosts)

    def host_array(self) -> Ints:
        """The host of each rank, as an array."""
        return np.array(self.hosts, dtype=np.int32)

    def members(self) -> list[list[int]]:
        """The ranks of each host, hosts in order of their first rank."""
        groups: dict[int, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            groups.setdefault(host, []).append(rank)
        return list(groups.values())
