"""What contenders on torch share: the store where they meet, and the operation of those that reduce in place."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from serving import Operation, Seat
from torch import Tensor

PATIENCE = timedelta(seconds=60)


def meet(seat: Seat) -> dist.Store:
    """The store of a crew, which rank 0 serves; each worker has one thread."""
    torch.set_num_threads(1)
    where, port = seat.store.rsplit(":", 1)
    return dist.TCPStore(where, int(port), seat.size, is_master=seat.rank == 0, timeout=PATIENCE)


def all_reduce_of(
    tensor: Tensor, rank: int, size: int, reduce: Callable[[Tensor], object], barrier: Callable[[], object]
) -> Operation:
    """Sum a tensor over all ranks. It holds zeros while it is timed, so that sums of sums do not overflow."""

    def check() -> None:
        # Small whole numbers, different at every place: a sum that is right is exactly right.
        pattern = torch.arange(tensor.numel(), dtype=torch.float32).remainder_(251.0)
        tensor.copy_(pattern).add_(float(rank))
        reduce(tensor)
        pattern.mul_(size).add_(size * (size - 1) / 2)
        if not torch.equal(tensor, pattern):
            wrong = int((tensor != pattern).sum())
            raise AssertionError(f"rank {rank}: {wrong} of {tensor.numel()} sums are wrong")
        tensor.zero_()

    return Operation(run=lambda: reduce(tensor), prepare=barrier, check=check)
