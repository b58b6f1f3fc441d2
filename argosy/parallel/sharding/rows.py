"""Rows of parameters: each worker owns some of every parameter, and all workers get all of them.

Rows are divided as torch divides a dimension: as many to each worker as the first one has, fewer or none to the last.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

_SMALL_BYTES = 1 << 16  # parameters below are gathered together: each operation would be mostly waiting


def bounds(rows: int, workers: int, rank: int) -> tuple[int, int]:
    """Where a worker's rows begin and end.

    >>> [bounds(5, 4, rank) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    size = -(-rows // workers)
    return min(rank * size, rows), min((rank + 1) * size, rows)


class Rows:
    """Collects the rows that others own."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._size, self._rank = group, dist.get_world_size(group), dist.get_rank(group)

    @torch.no_grad()
    def gather(self, parameters: list[nn.Parameter]) -> None:
        """Replace each parameter's rows by their owners'."""
        if self._size == 1:
            return
        together: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter in parameters:
            whole = parameter.detach()
            if not whole.dim() or not whole.numel():
                continue  # a single number is everybody's
            even = whole.shape[0] % self._size == 0 and whole.is_contiguous()
            if even and whole.numel() * whole.element_size() >= _SMALL_BYTES:
                flat = whole.view(-1)
                part = flat.numel() // self._size
                dist.all_gather_single(flat, flat[self._rank * part : (self._rank + 1) * part], group=self._group)
            else:
                together.setdefault((whole.dtype, whole.device), []).append(whole)
        for tensors in together.values():
            self._gather_together(tensors)

    def _gather_together(self, tensors: list[Tensor]) -> None:
        """In one operation, with the parts padded to the size of the first worker's."""
        rooms = [bounds(len(whole), self._size, 0)[1] * whole[0].numel() for whole in tensors]
        mine = tensors[0].new_zeros(sum(rooms))
        for whole, room in zip(tensors, mine.split(rooms), strict=True):
            begin, end = bounds(len(whole), self._size, self._rank)
            room[: (end - begin) * whole[0].numel()].view_as(whole[begin:end]).copy_(whole[begin:end])
        all_parts = mine.new_empty(self._size * mine.numel())
        dist.all_gather_single(all_parts, mine, group=self._group)
        for rank, parts in enumerate(all_parts.split(mine.numel())):
            for whole, room in zip(tensors, parts.split(rooms), strict=True):
                begin, end = bounds(len(whole), self._size, rank)
                whole[begin:end].copy_(room[: (end - begin) * whole[0].numel()].view(whole[begin:end].shape))
