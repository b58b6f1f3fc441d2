"""The ring: every rank sends to the next one only. Least bytes for any number of ranks, most rounds.

Slot c is the chunk that rank c ends up with. While reducing, the partial sum of a chunk travels once around the
ring and ends, complete, at its owner; while gathering, the finished chunk travels around again.
"""

from __future__ import annotations

import numpy as np

from argosy.comm.schedule import Collective, Made, Round, Schedule, in_turn, transfers
from argosy.comm.topology import Topology


def reduce_rounds(ranks: int) -> Made:
    """N - 1 rounds after which rank r holds the whole sum of chunk r."""
    return _around(ranks, first=-1, reduce=True)


def gather_rounds(ranks: int) -> Made:
    """N - 1 rounds that bring chunk r from rank r to all."""
    return _around(ranks, first=0, reduce=False)


def _around(ranks: int, first: int, reduce: bool) -> Made:
    """In round k, rank r sends chunk r + first - k to the next rank."""
    rank = np.arange(ranks, dtype=np.int32)
    same = transfers(rank, (rank + 1) % ranks, 0, reduce=reduce)

    def make(number: int) -> Round:
        chunk = (rank + (first - number)) % ranks
        return same._replace(begin=chunk, into=chunk)

    return Made(ranks - 1, make)


def reduce_scatter(topology: Topology) -> Schedule:
    """N - 1 rounds; every rank sends (N - 1) / N of its data."""
    return Schedule("ring", Collective.REDUCE_SCATTER, topology.ranks, topology.ranks, reduce_rounds(topology.ranks))


def all_gather(topology: Topology) -> Schedule:
    """N - 1 rounds; every rank sends (N - 1) / N of the result."""
    return Schedule("ring", Collective.ALL_GATHER, topology.ranks, topology.ranks, gather_rounds(topology.ranks))


def all_reduce(topology: Topology) -> Schedule:
    """2 (N - 1) rounds; every rank sends 2 (N - 1) / N of its data."""
    ranks = topology.ranks
    rounds = in_turn(reduce_rounds(ranks), gather_rounds(ranks))
    return Schedule("ring", Collective.ALL_REDUCE, ranks, ranks, rounds)
