"""Pairwise exchange, for all-to-all: in round k every rank sends to the one k places further on.

Slots 0 .. N-1 are what a rank sends, by target; slots N .. 2N-1 are what it receives, by source.
"""

from __future__ import annotations

import numpy as np

from argosy.comm.schedule import Collective, Made, Round, Schedule, transfers
from argosy.comm.topology import Topology


def all_to_all(topology: Topology) -> Schedule:
    """N rounds, the first of which stays at home; every rank sends (N - 1) / N of its data."""
    ranks = topology.ranks
    rank = np.arange(ranks)

    def make(number: int) -> Round:
        target = (rank + number) % ranks
        return transfers(rank, target, target, into=ranks + rank, reduce=False)

    return Schedule("pairwise", Collective.ALL_TO_ALL, ranks, 2 * ranks, Made(ranks, make))
