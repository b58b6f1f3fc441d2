"""Clipping by the norm of the whole gradient, wherever its parts are.

Each worker adds up the squares of what it holds, divided by how many workers hold the same, and one sum over all of
them is the square of the norm: across shards, layers' parts and stages alike.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from argosy.comm.group import Group


@torch.no_grad()
def clip_by_global_norm(
    parameters: Iterable[nn.Parameter], most: float, group: Group, holders: int, counted: Container[int] | None = None
) -> float:
    """Scale gradients down so that the norm of all of them together is at most `most`; the norm that they had.

    `holders`: how many workers hold each parameter, in parts or whole. `counted` has the ids of the parameters that are
    in the norm by this worker, if others have some of them too; by default all are.

    >>> from argosy.comm.group import SoloGroup
    >>> parameter = nn.Parameter(torch.zeros(2))
    >>> parameter.grad = torch.tensor([3.0, 4.0])
    >>> clip_by_global_norm([parameter], 1.0, SoloGroup(), holders=1)
    5.0
    >>> parameter.grad
    tensor([0.6000, 0.8000])
    """
    if not most > 0:
        raise ValueError(f"clip_norm={most}: the norm that gradients are clipped to is more than 0")
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [cast(Tensor, parameter.grad) for parameter in trained]
    parts = [cast(Tensor, each.grad) for each in trained if counted is None or id(each) in counted]
    squares = sum((_square(_local(_added_up(part))) * _copies(part, holders) for part in parts), 0.0)
    total = torch.tensor([squares], dtype=torch.float64)
    group.all_reduce(total)
    norm = float(total.sqrt())
    if norm + 1e-6 > most:
        for gradient in gradients:
            _local(gradient).mul_(most / (norm + 1e-6))
    return norm


def _local(gradient: Tensor) -> Tensor:
    part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return part._values() if part.is_sparse else part


def _added_up(gradient: Tensor) -> Tensor:
    """A sparse gradient may have several entries for one row."""
    return gradient.coalesce() if gradient.is_sparse else gradient


def _square(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float32 if values.dtype.itemsize < 4 else None)) ** 2


def _copies(gradient: Tensor, holders: int) -> float:
    """Of all workers that hold the gradient, the fraction that each number of it is worth on one of them."""
    if not isinstance(gradient, DTensor):
        return 1 / holders
    parts = 1
    for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
        parts *= 1 if isinstance(placement, Replicate) else size
    return parts / holders
