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
class Topology:
    """Ranks on hosts. Ranks of one host talk over `inside`; ranks of two hosts over the hosts' own links, `between`.

    A host has one link to the network: the transfers of its ranks share it, each direction by itself.

    >>> Topology.uniform(ranks=6, per_host=4).hosts
    (0, 0, 0, 0, 1, 1)
    """

    hosts: tuple[int, ...]
    inside: Link = field(default_factory=lambda: Link(1e-6, 5e9))
    between: Link = field(default_factory=lambda: Link.ethernet(10))
    reduce_bytes_per_second: float = 10e9

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
