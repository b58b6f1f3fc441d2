"""The weighted mean of a value over workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

Value = TypeVar("Value", float, Tensor)


def weighted_mean(value: Tensor | float, weight: float, add_up: Callable[[Tensor], Any]) -> Tensor:
    """The mean in double precision, on the CPU. A worker of weight zero is left out, whatever its value (NaN too).

    `add_up` replaces a tensor by the sum of all workers' tensors, as a group's `all_reduce` does.
    """
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(f"weight={weight}: a weight is zero or more")
    mine = torch.as_tensor(value, dtype=torch.float64, device="cpu").detach()
    sums = torch.zeros(mine.numel() + 1, dtype=torch.float64)
    if weight:
        sums[:-1] = mine.reshape(-1) * weight
        sums[-1] = weight
    add_up(sums)
    if not sums[-1]:
        raise ValueError("the weights of all workers are zero: there is nothing to take the mean of")
    return (sums[:-1] / sums[-1]).reshape(mine.shape)


def mean_of(value: Value, weight: float, add_up: Callable[[Tensor], Any]) -> Value:
    """The same as the value is: a number, or a tensor of its type on its device."""
    mean = weighted_mean(value, weight, add_up)
    if isinstance(value, Tensor):
        kind = value.dtype if value.dtype.is_floating_point else torch.get_default_dtype()
        return mean.to(value.device, kind)
    return float(mean)
