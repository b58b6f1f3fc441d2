"""Sharding (ZeRO): workers of the shard axis divide optimizer states, gradients and parameters among them.

Read `choose.py` (which modules), then `fully.py` (stages 2 and 3, on torch's `fully_shard`; `parallel/divided.py` has
how such models train), `states.py` (stage 1) and `swap.py` (how an optimizer gets the sharded parameters).
"""
