"""Hierarchical: reduce inside each host, all-reduce between hosts, hand out inside. The network carries the least.

The data is cut into as many segments as the smallest host has ranks; on every host, segment j belongs to the j-th
rank. Inside a host each rank gives each owner its segment. Then the owners of segment j on all hosts form a ring and
all-reduce it, all segments side by side, sharing the host's link. At last the owners hand the result out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from argosy.comm.algorithms import ring
from argosy.comm.schedule import Collective, Made, Round, Schedule, in_turn, together, transfers
from argosy.comm.topology import Topology


def all_reduce(topology: Topology) -> Schedule:
    """2 (L - 1) rounds inside hosts of L ranks, 2 (H - 1) between H hosts; a host's link carries 2 (H - 1) / H."""
    hosts = topology.members()
    owners = min(len(members) for members in hosts)
    part = len(hosts)  # slots in a segment: one for each host of the ring between them
    collecting = together([_collect(np.array(members), owners, part) for members in hosts])
    handing_out = [transfers(r.target, r.source, r.begin, width=r.width, reduce=False) for r in reversed(collecting)]
    segments = np.array([[members[owner] for members in hosts] for owner in range(owners)])
    reducing, gathering = (_across(segments, rounds) for rounds in (ring.reduce_rounds(part), ring.gather_rounds(part)))
    rounds = in_turn(collecting, reducing, gathering, handing_out)
    return Schedule("hierarchical", Collective.ALL_REDUCE, topology.ranks, owners * part, rounds)


def _collect(members: np.ndarray, owners: int, part: int) -> list[Round]:
    """Each member gives each owner its segment; in round k a member is k places ahead of the owner it serves."""
    rounds = []
    for ahead in range(1, len(members)):
        owner = np.arange(owners)
        giver = (owner + ahead) % len(members)
        rounds.append(transfers(members[giver], members[owner], owner * part, width=part))
    return rounds


def _across(segments: np.ndarray, rounds: Made) -> Sequence[Round]:
    """Rounds of a ring among hosts, as rounds of the rings of all segments; `segments` has the owners of each."""
    if not len(rounds):
        return []
    owners, part = segments.shape
    ring_round = rounds[0]
    reduce = np.tile(ring_round.reduce, owners)
    same = transfers(segments[:, ring_round.source].ravel(), segments[:, ring_round.target].ravel(), 0, reduce=reduce)
    segment_begin = np.repeat(np.arange(owners, dtype=np.int32) * part, part)

    def make(number: int) -> Round:
        begin = np.tile(rounds[number].begin, owners) + segment_begin
        return same._replace(begin=begin, into=begin)

    return Made(len(rounds), make)
