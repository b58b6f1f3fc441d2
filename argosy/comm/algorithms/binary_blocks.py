"""Binary blocks: halving and doubling for any number of ranks (600 = 512 + 64 + 16 + 8).

The ranks are cut into blocks, one for each bit of their number, the largest first. Each block halves by itself. Then,
from the smallest block up, each member of a block hands its part of the sum to the members of the next larger block
that hold the same slots, so that the largest block has it all; results go down the same way, and each block doubles.
No rank handles all the data alone, as the folded ranks of plain halving and doubling do.
"""

from __future__ import annotations

import itertools

import numpy as np

from argosy.comm.algorithms import halving_doubling
from argosy.comm.schedule import Collective, Ints, Round, Schedule, together, transfers
from argosy.comm.topology import Topology


def blocks(ranks: int) -> list[Ints]:
    """The ranks of each block, the largest first.

    >>> [len(block) for block in blocks(600)]
    [512, 64, 16, 8]
    """
    sizes = [1 << bit for bit in reversed(range(ranks.bit_length())) if ranks >> bit & 1]
    starts = itertools.accumulate([0, *sizes])
    return [np.arange(start, start + size, dtype=np.int32) for start, size in zip(starts, sizes, strict=False)]


def all_reduce(topology: Topology) -> Schedule:
    """2 (log2 of the largest block + blocks - 1) rounds; blocks halve and double side by side."""
    parts = blocks(topology.ranks)
    slots = len(parts[0])
    upwards = [_hand(smaller, larger, slots) for larger, smaller in itertools.pairwise(parts)][::-1]
    downwards = [_reverse(round_) for round_ in reversed(upwards)]
    halving = together([halving_doubling.reduce_rounds(block, slots) for block in parts])
    doubling = together([halving_doubling.gather_rounds(block, slots) for block in parts])
    rounds = [*halving, *upwards, *downwards, *doubling]
    return Schedule("binary_blocks", Collective.ALL_REDUCE, topology.ranks, slots, rounds)


def _hand(smaller: Ints, larger: Ints, slots: int) -> Round:
    """Each member of the larger block is handed its slots by the member of the smaller one that holds them."""
    number = np.arange(len(larger))
    part = slots // len(larger)
    return transfers(smaller[number * len(smaller) // len(larger)], larger, number * part, width=part)


def _reverse(given: Round) -> Round:
    return transfers(given.target, given.source, given.into, width=given.width, reduce=False)
