"""Draws the pictures of docs/algorithms.md from the schedules themselves: `python docs/algorithms/draw.py`."""

from pathlib import Path

from argosy.comm.algorithms import binary_blocks, halving_doubling, hierarchical, pairwise, ring, tree
from argosy.comm.draw import svg
from argosy.comm.topology import Topology

PICTURES = {
    "ring": ring.all_reduce(Topology.uniform(4)),
    "halving_doubling": halving_doubling.all_reduce(Topology.uniform(4)),
    "binary_blocks": binary_blocks.all_reduce(Topology.uniform(7)),
    "tree": tree.all_reduce(Topology.uniform(6)),
    "hierarchical": hierarchical.all_reduce(Topology.uniform(4, per_host=2)),
    "pairwise": pairwise.all_to_all(Topology.uniform(4)),
}


def main() -> None:
    """Write every picture beside this file."""
    for name, schedule in PICTURES.items():
        Path(__file__).with_name(f"{name}.svg").write_text(svg(schedule))


if __name__ == "__main__":
    main()
