"""How saving and loading can fail: one error, which says what, where, and what to do."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read: which one, why, and what to do."""
