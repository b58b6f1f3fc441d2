"""The weighted mean of a value over the workers of a group."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from argosy.comm.group import Group


def weighted_mean(value: Tensor | float, weight: float, group: Group) -> Tensor:
    """The mean in double precision, on the CPU. A worker of weight zero is left out, whatever its value (NaN too)."""
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(f"weight={weight}: a weight is zero or more")
    mine = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
    sums = torch.zeros(mine.numel() + 1, dtype=torch.float64)
    if weight:
        sums[:-1] = mine.reshape(-1) * weight
        sums[-1] = weight
    group.all_reduce(sums)
    if not sums[-1]:
        raise ValueError("the weights of all workers are zero: there is nothing to take the mean of")
    return (sums[:-1] / sums[-1]).reshape(mine.shape)
