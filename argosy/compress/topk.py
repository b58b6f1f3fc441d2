"""Top-k: the largest numbers of each gradient are sent, and what is left out is added to the next one.

The plainest of the sparse codecs (`sparse.py` has the machinery): no momentum, no warm-up, any optimizer.
"""

from __future__ import annotations

from typing import Final

from argosy.compress.codec import Part
from argosy.compress.sparse import Exchange, SparseCodec

MIN_ELEMENTS: Final = 1024  # smaller tensors are sent whole: biases and the like, of which little is to be had


class TopKCodec(SparseCodec):
    """Sends `fraction` of each tensor that has at least 1024 elements."""

    def __init__(self, fraction: float = 0.01, exchange: Exchange | None = None) -> None:
        super().__init__(exchange)
        self._fraction = fraction

    def suits(self, part: Part) -> bool:
        """Large tensors only."""
        return part.end - part.begin >= MIN_ELEMENTS

    def fraction(self) -> float:
        """The same in all steps."""
        return self._fraction
