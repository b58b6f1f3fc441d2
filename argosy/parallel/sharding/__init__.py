"""Sharding (ZeRO): workers of the shard axis divide optimizer states, gradients and parameters among them.

Read `choose.py` (which modules), then `fully.py` (stages 2 and 3, on torch's `fully_shard`), `states.py` (stage 1) and
`swap.py` (how an optimizer that was made before gets the sharded parameters).
"""
