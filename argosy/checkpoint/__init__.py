"""Checkpoints: whole or absent, and loadable on any mesh of workers.

Read `boxes.py` and `pieces.py` (a tensor as its parts), `tree.py` (state dicts as JSON and tensors), `manifest.py` and
`shard.py` (what is on disk), `storage.py` (how it gets there whole), `plan.py`, `save.py`, `write.py` (who writes
what), `read.py` (who reads what), then `parts.py` and `optimizer.py` (models, optimizers and the rest).
"""
