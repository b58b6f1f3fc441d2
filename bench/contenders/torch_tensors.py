"""The operation of contenders that reduce torch tensors in place: filled, checked once, then timed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from serving import Operation
from torch import Tensor


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
