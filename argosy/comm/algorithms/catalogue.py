"""All algorithms by collective and name."""

from __future__ import annotations

from collections.abc import Callable

from argosy.comm.algorithms import binary_blocks, halving_doubling, hierarchical, pairwise, ring, tree
from argosy.comm.schedule import Collective, Schedule

Algorithm = Callable[..., Schedule]

ALGORITHMS: dict[Collective, dict[str, Algorithm]] = {
    Collective.ALL_REDUCE: {
        "ring": ring.all_reduce,
        "halving_doubling": halving_doubling.all_reduce,
        "binary_blocks": binary_blocks.all_reduce,
        "tree": tree.all_reduce,
        "hierarchical": hierarchical.all_reduce,
    },
    Collective.REDUCE_SCATTER: {"ring": ring.reduce_scatter, "halving_doubling": halving_doubling.reduce_scatter},
    Collective.ALL_GATHER: {"ring": ring.all_gather, "halving_doubling": halving_doubling.all_gather},
    Collective.BROADCAST: {"tree": tree.broadcast},
    Collective.REDUCE: {"tree": tree.reduce},
    Collective.ALL_TO_ALL: {"pairwise": pairwise.all_to_all},
}


def suits(name: str, collective: Collective, ranks: int) -> bool:
    """Whether an algorithm can be used with this number of ranks."""
    needs_power = name == "halving_doubling" and collective is not Collective.ALL_REDUCE
    return not needs_power or ranks & (ranks - 1) == 0
