"""Hierarchical: reduce inside each host, all-reduce between hosts, hand out inside. The network carries the least.

The data is cut into as many segments as the smallest host has ranks; on every host, segment j belongs to the j-th
rank. Inside a host each rank gives each owner its segment. Then the owners of segment j on all hosts form a ring and
all-reduce it, all segments side by side, sharing the host's link. At last the owners hand the result out.
"""

from __future__ import annotations

import numpy as np

from argosy.comm.algorithms import ring
from argosy.comm.schedule import Collective, Round, Schedule, together, transfers
from argosy.comm.topology import Topology


def all_reduce(topology: Topology) -> Schedule:
    """2 (L - 1) rounds inside hosts of L ranks, 2 (H - 1) between H hosts; a host's link carries 2 (H - 1) / H."""
    hosts = topology.members()
    owners = min(len(members) for members in hosts)
    part = len(hosts)  # slots in a segment: one for each host of the ring between them
    collecting = together([_collect(np.array(members), owners, part) for members in hosts])
    handing_out = [transfers(r.target, r.source, r.begin, width=r.width, reduce=False) for r in reversed(collecting)]
    between = together([_across(hosts, owner, part) for owner in range(owners)])
    rounds = [*collecting, *between, *handing_out]
    return Schedule("hierarchical", Collective.ALL_REDUCE, topology.ranks, owners * part, rounds)


def _collect(members: np.ndarray, owners: int, part: int) -> list[Round]:
    """Each member gives each owner its segment; in round k a member is k places ahead of the owner it serves."""
    rounds = []
    for ahead in range(1, len(members)):
        owner = np.arange(owners)
        giver = (owner + ahead) % len(members)
        rounds.append(transfers(members[giver], members[owner], owner * part, width=part))
    return rounds


def _across(hosts: list[list[int]], owner: int, part: int) -> list[Round]:
    """The ring among the owners of one segment."""
    members = np.array([ranks[owner] for ranks in hosts])
    rounds = [*ring.reduce_rounds(part), *ring.gather_rounds(part)]
    return [transfers(members[r.source], members[r.target], r.begin + owner * part, reduce=r.reduce) for r in rounds]
