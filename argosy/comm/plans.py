"""From schedules to what the native engine runs: one rank's steps, under a number that all ranks give the algorithm."""

from __future__ import annotations

from typing import NamedTuple

from argosy.comm.algorithms.catalogue import ALGORITHMS
from argosy.comm.schedule import Collective, Step
from argosy.comm.topology import Topology

DIRECT = "direct"
"""Inside one host: the ranks read each other's memory, and there is nothing to plan."""

NUMBERS = {
    name: number
    for number, name in enumerate(
        (DIRECT, "ring", "halving_doubling", "binary_blocks", "tree", "hierarchical", "pairwise")
    )
}


class Plan(NamedTuple):
    """One rank's steps, in slots of which the buffer has `slots`.

    A hierarchical plan has the steps between hosts only, and `owners`: so many ranks of each host own a part, and what
    happens inside the host is done in shared memory.
    """

    slots: int
    owners: int
    steps: list[Step]


def make_plan(collective: Collective, name: str, topology: Topology, root: int, rank: int) -> Plan:
    """What one rank does in a collective by the named algorithm.

    >>> make_plan(Collective.BROADCAST, "tree", Topology.uniform(ranks=2), root=1, rank=0).steps
    [Step(kind=1, peer=1, begin=0, width=1)]
    """
    algorithm = ALGORITHMS[collective][name]
    rooted = collective in (Collective.BROADCAST, Collective.REDUCE)
    schedule = algorithm(topology, root) if rooted else algorithm(topology)
    steps = schedule.program(rank)
    if name != "hierarchical":
        return Plan(schedule.slots, 0, steps)
    owners = min(len(members) for members in topology.members())
    away = [step for step in steps if topology.hosts[step.peer] != topology.hosts[rank]]
    return Plan(schedule.slots, owners, away)
