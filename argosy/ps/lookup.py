"""From any ids to rows and back: what an embedding computes between a script's tensors and a table.

A batch repeats its ids. A table sees each of them once: ids are made distinct, their rows are pulled and spread over
the places where the ids stood, and gradients of the same id are added up. Bags of ids come out as one row each, their
sum or mean. All of it is native code.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from argosy._native import Distinct
from argosy._native import add_up as native_add_up
from argosy._native import add_up_bags as native_add_up_bags
from argosy._native import expand as native_expand
from argosy._native import expand_bags as native_expand_bags


@dataclass(frozen=True)
class Bags:
    """Which ids belong together: those of bag b are from `offsets[b]` to `offsets[b + 1]`."""

    offsets: Tensor  # int64, one more than there are bags
    mean: bool


@dataclass(frozen=True)
class Lookup:
    """The ids of a batch, made distinct: each with the number of its places; and for each place, which of them."""

    ids: Tensor  # int64
    places: Tensor  # int32
    shows: Tensor  # int32
    given: Tensor  # a copy of what was looked up
    bags: Bags | None = None

    @classmethod
    def of(cls, ids: Tensor, bags: Bags | None = None) -> Lookup:
        """Make ids distinct, in the order of their first places; once, if several embeddings look up the same tensor.

        >>> Lookup.of(torch.tensor([5, -3, 5])).ids.tolist()
        [5, -3]
        """
        for known, lookup in _recent:
            if known() is ids and lookup.is_of(ids):
                return replace(lookup, bags=bags)
        lookup = cls._of(ids, bags)
        _recent.append((weakref.ref(ids), lookup))
        return lookup

    @classmethod
    def _of(cls, ids: Tensor, bags: Bags | None) -> Lookup:
        flat = ids.reshape(-1).contiguous()
        count = len(flat)
        distinct = torch.empty(count, dtype=torch.int64)
        places, shows = torch.empty(count, dtype=torch.int32), torch.empty(count, dtype=torch.int32)
        finder = _own.finder if count <= _OFTEN else Distinct()
        found = finder.find(flat.data_ptr(), count)
        ctypes.memmove(distinct.data_ptr(), finder.ids_at, 8 * found)
        ctypes.memmove(places.data_ptr(), finder.places_at, 4 * count)
        ctypes.memmove(shows.data_ptr(), finder.counts_at, 4 * found)
        return cls(distinct[:found], places, shows[:found], ids.clone(), bags)

    def is_of(self, ids: Tensor, offsets: Tensor | None = None) -> bool:
        """Whether these are the ids that were looked up and, if they are given, the offsets of their bags.

        By the numbers: torch does not see what NumPy, another process or `data` writes into memory that is used again.
        """
        if offsets is not None and (self.bags is None or not torch.equal(self.bags.offsets[:-1], offsets)):
            return False
        return torch.equal(self.given, ids)

    @property
    def outputs(self) -> int:
        """How many rows come out."""
        return len(self.places) if self.bags is None else len(self.bags.offsets) - 1

    def spread(self, rows: Tensor) -> Tensor:
        """The rows of the distinct ids, in the shape in which the ids stood; or the sum or mean of each bag.

        >>> Lookup.of(torch.tensor([5, -3, 5])).spread(torch.tensor([[1.0], [2.0]])).tolist()
        [[1.0], [2.0], [1.0]]
        """
        dim = rows.shape[1]
        out = torch.empty(*(self.given.shape if self.bags is None else (self.outputs,)), dim)
        if self.bags is None:
            native_expand(rows.data_ptr(), self.places.data_ptr(), len(self.places), dim, out.data_ptr())
        else:
            offsets, mean = self.bags.offsets, self.bags.mean
            native_expand_bags(
                rows.data_ptr(), self.places.data_ptr(), offsets.data_ptr(), self.outputs, dim, mean, out.data_ptr()
            )
        return out

    def add_up(self, gradients: Tensor) -> Tensor:
        """The other way: for each distinct id, the sum of what its places got, in any shape.

        >>> Lookup.of(torch.tensor([5, -3, 5])).add_up(torch.tensor([[1.0], [2.0], [3.0]])).tolist()
        [[4.0], [2.0]]
        """
        gradients, dim = gradients.to(torch.float32), gradients.shape[-1]
        rows = torch.zeros(len(self.ids), dim)
        if self.bags is None:
            # Those of a batch may be some columns of a larger matrix: a gap after each sample does not need a copy.
            if gradients.dim() < 2 or gradients.is_contiguous() or not gradients[0].is_contiguous():
                gradients = gradients.reshape(1, -1, dim).contiguous()
            in_a_row, pitch = max(gradients[0].numel() // dim, 1), gradients.stride(0)
            native_add_up(
                gradients.data_ptr(), in_a_row, pitch, self.places.data_ptr(), len(self.places), dim, rows.data_ptr()
            )
        else:
            gradients = gradients.contiguous()
            offsets, mean = self.bags.offsets, self.bags.mean
            native_add_up_bags(
                gradients.data_ptr(),
                self.places.data_ptr(),
                offsets.data_ptr(),
                self.outputs,
                dim,
                mean,
                rows.data_ptr(),
            )
        return rows

    def add_up_clicks(self, clicks: Tensor) -> Tensor:
        """For each distinct id, the clicks of its places; those of a bag count for each of its ids."""
        per_place = clicks.reshape(-1).to(torch.float32)
        if self.bags is not None:
            per_place = per_place.repeat_interleave(self.bags.offsets.diff())
        return torch.zeros(len(self.ids)).index_add_(0, self.places.long(), per_place)


_OFTEN = 1 << 22  # ids of a batch: memory for more than these is not kept


class _Own(threading.local):
    """Of each thread: its memory is used again, and batches are like the last ones."""

    def __init__(self) -> None:
        self.finder = Distinct()


_own = _Own()
_recent: deque[tuple[weakref.ref[Tensor], Lookup]] = deque(maxlen=4)  # this batch's and the next one's
