"""The binomial tree: everything to a root in log2(N) rounds, and back. Fewest rounds, so best for little data.

Counted from the root, rank r hands what it has to r - 2^k in round k, where 2^k is the lowest bit of r.
"""

from __future__ import annotations

import numpy as np

from argosy.comm.schedule import Collective, Round, Schedule, transfers
from argosy.comm.topology import Topology


def reduce_rounds(ranks: int, root: int) -> list[Round]:
    """ceil(log2(N)) rounds after which the root holds the sum."""
    rounds = []
    for place in range((ranks - 1).bit_length()):
        bit = 1 << place
        child = np.arange(bit, ranks, 2 * bit)
        rounds.append(transfers((child + root) % ranks, (child - bit + root) % ranks, 0))
    return rounds


def broadcast_rounds(ranks: int, root: int) -> list[Round]:
    """The same tree from the root outwards."""
    return [transfers(part.target, part.source, 0, reduce=False) for part in reversed(reduce_rounds(ranks, root))]


def reduce(topology: Topology, root: int = 0) -> Schedule:
    """log2(N) rounds of all the data."""
    return Schedule("tree", Collective.REDUCE, topology.ranks, 1, reduce_rounds(topology.ranks, root), root)


def broadcast(topology: Topology, root: int = 0) -> Schedule:
    """log2(N) rounds of all the data."""
    return Schedule("tree", Collective.BROADCAST, topology.ranks, 1, broadcast_rounds(topology.ranks, root), root)


def all_reduce(topology: Topology) -> Schedule:
    """2 log2(N) rounds of all the data."""
    rounds = [*reduce_rounds(topology.ranks, 0), *broadcast_rounds(topology.ranks, 0)]
    return Schedule("tree", Collective.ALL_REDUCE, topology.ranks, 1, rounds)
