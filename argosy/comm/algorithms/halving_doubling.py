"""Recursive halving and doubling: log2(N) rounds; in each, partners are half as far apart and halve the data.

Partners differ in one bit of their number, the highest first; of the slots they both work on, the one whose bit is 0
keeps the lower half. So rank r of N = 2^k ends with slot r. Gathering is the same in reverse.

Another number of ranks is folded first: each rank beyond the largest power of two hands its data to a partner, and is
given the result in the end. That costs two more rounds of all the data; `binary_blocks.py` does better.
"""

from __future__ import annotations

import numpy as np

from argosy.comm.schedule import Collective, Ints, Round, Schedule, transfers
from argosy.comm.topology import Topology


def largest_power(ranks: int) -> int:
    """The largest power of two that is not more than `ranks`."""
    return 1 << (ranks.bit_length() - 1)


def reduce_rounds(members: Ints, slots: int) -> list[Round]:
    """Halving among 2^k members, after which member i holds the sum of the i-th of 2^k parts of the slots."""
    return [_exchange(members, slots, bit, reducing=True) for bit in _bits(len(members))]


def gather_rounds(members: Ints, slots: int) -> list[Round]:
    """Doubling among 2^k members: the i-th part of the slots goes from member i to all."""
    return [_exchange(members, slots, bit, reducing=False) for bit in reversed(_bits(len(members)))]


def _bits(size: int) -> list[int]:
    """The bits of a member's number, the highest first."""
    return [1 << place for place in reversed(range(size.bit_length() - 1))]


def _exchange(members: Ints, slots: int, bit: int, reducing: bool) -> Round:
    """Every member and its partner swap one half of the slots that they share."""
    number = np.arange(len(members))
    partner = number ^ bit
    part = slots // len(members) * bit  # the slots that each of the two keeps
    # Halving, a member sends the half that its partner keeps; doubling, the half that it keeps itself.
    keeper = partner if reducing else number
    return transfers(members, members[partner], keeper // bit * part, width=part, reduce=reducing)


def reduce_scatter(topology: Topology) -> Schedule:
    """log2(N) rounds; every rank sends (N - 1) / N of its data. For powers of two."""
    ranks = _power_of_two(topology.ranks)
    rounds = reduce_rounds(np.arange(ranks, dtype=np.int32), ranks)
    return Schedule("halving_doubling", Collective.REDUCE_SCATTER, ranks, ranks, rounds)


def all_gather(topology: Topology) -> Schedule:
    """log2(N) rounds; every rank sends (N - 1) / N of the result. For powers of two."""
    ranks = _power_of_two(topology.ranks)
    rounds = gather_rounds(np.arange(ranks, dtype=np.int32), ranks)
    return Schedule("halving_doubling", Collective.ALL_GATHER, ranks, ranks, rounds)


def all_reduce(topology: Topology) -> Schedule:
    """2 log2(N) rounds, and two more of all the data if N is not a power of two."""
    ranks = topology.ranks
    power = largest_power(ranks)
    members = np.arange(power, dtype=np.int32)
    rounds = [*reduce_rounds(members, power), *gather_rounds(members, power)]
    if power < ranks:
        extra = np.arange(power, ranks)
        rounds.insert(0, transfers(extra, extra - power, 0, width=power))
        rounds.append(transfers(extra - power, extra, 0, width=power, reduce=False))
    return Schedule("halving_doubling", Collective.ALL_REDUCE, ranks, power, rounds)


def _power_of_two(ranks: int) -> int:
    if ranks & (ranks - 1):
        raise ValueError(f"halving_doubling needs a power of two here, and there are {ranks} ranks; use ring")
    return ranks
