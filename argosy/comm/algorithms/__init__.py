"""Algorithms: functions from a topology to a schedule. An algorithm fits on a page.

All-reduce: `ring.py`, `halving_doubling.py`, `binary_blocks.py`, `tree.py`, `hierarchical.py`. The parts of these that
are collectives of their own (reduce-scatter, all-gather, broadcast, reduce) stand beside them; `pairwise.py` has
all-to-all. `catalogue.py` lists them all.
"""
