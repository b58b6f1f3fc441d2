"""How saving and loading can fail: one error, which says what, where, and what to do."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read: which one, why, and what to do."""


class NoCheckpoint(CheckpointError):
    """There is none: nothing is damaged, nothing was ever saved there."""


def reason(error: Exception) -> str:
    """Why data could not be understood, in words: never the data themselves."""
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return str(error) or type(error).__name__
