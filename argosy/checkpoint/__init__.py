"""Checkpoints: whole or absent, and loadable on any number of workers.

Read `files.py` (what is on disk), `tree.py` (state dicts as JSON and tensors), then `whole.py` (with a group).
"""
