"""Rows that were asked for before they are needed: they travel while the script comes to its next lookup.

What a script looks up is known when it calls the embedding, one batch at a time. But most often it is a tensor of the
batch, or a part of one, and the same part in every batch. So the first use is remembered as a place in the batch
(which tensor, and which of its elements), and when the loader has the next batch at hand, its rows are asked for. At
the call it is checked that the ids are the very ones; if not, they are pulled as if nothing had been asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from argosy.ps.lookup import Lookup


@dataclass(frozen=True)
class Part:
    """A tensor as a part of a batch: the number of a tensor in it, and which elements by their strides.

    Sizes are relative: a batch may be shorter than the last one.
    """

    leaf: int
    whole: bool
    column: int | None = None  # of the last dimension

    @classmethod
    def find(cls, wanted: Tensor, batch: Any) -> Part | None:
        """Where `wanted` is in the batch: one of its tensors, or a column of one."""
        for number, leaf in enumerate(pytree.tree_leaves(batch)):
            if not isinstance(leaf, Tensor) or leaf.dtype != torch.int64 or leaf.device.type != "cpu":
                continue
            if _same(leaf, wanted):
                return cls(number, whole=True)
            if leaf.dim() > 1 and leaf.shape[:-1] == wanted.shape:
                columns = (leaf[..., column] for column in range(leaf.shape[-1]))
                found = next((column for column, part in enumerate(columns) if _same(part, wanted)), None)
                if found is not None:
                    return cls(number, whole=False, column=found)
        return None

    def of(self, batch: Any) -> Tensor | None:
        """The same part of another batch."""
        leaves = pytree.tree_leaves(batch)
        leaf = leaves[self.leaf] if self.leaf < len(leaves) else None
        if not isinstance(leaf, Tensor) or leaf.dtype != torch.int64:
            return None
        if self.whole:
            return leaf
        return leaf[..., self.column] if leaf.dim() > 1 and (self.column or 0) < leaf.shape[-1] else None


class Ahead:
    """What one embedding has asked for, and where in a batch it finds its ids."""

    def __init__(self) -> None:
        self.used: tuple[Tensor, Tensor | None] | None = None  # ids and offsets of the last call
        self._asked: list[tuple[Tensor, Tensor | None, Lookup, Any]] = []

    def put(self, ids: Tensor, offsets: Tensor | None, lookup: Lookup, started: Any) -> list[Any]:
        """Rows are under way. Returns what was asked for earlier, and nobody has taken: whoever started it ends it."""
        forgotten = [asked[-1] for asked in self._asked[:-1]]
        del self._asked[:-1]
        self._asked.append((ids, offsets, lookup, started))
        return forgotten

    def take(self, ids: Tensor, offsets: Tensor | None) -> tuple[Lookup, Any] | None:
        """What was asked for these very tensors, if it was."""
        self.used = ids, offsets
        for place, (asked_ids, asked_offsets, lookup, started) in enumerate(self._asked):
            same = _same(asked_ids, ids) and _both_same(asked_offsets, offsets)
            if same and lookup.is_of(ids, offsets):  # nobody has written to them since
                del self._asked[place]
                return lookup, started
        return None

    def parts(self, batch: Any) -> tuple[Part, Part | None] | None:
        """Where the last call's ids and offsets are in the batch that they came from."""
        if self.used is None:
            return None
        ids, offsets = self.used
        place = Part.find(ids, batch)
        at = Part.find(offsets, batch) if offsets is not None else None
        return None if place is None or (offsets is not None and at is None) else (place, at)


def _same(one: Tensor, other: Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


def _both_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return _same(one, other)
