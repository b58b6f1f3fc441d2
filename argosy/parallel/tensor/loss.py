"""Cross-entropy of logits that are divided by vocabulary: two small sums over ranks instead of gathering them.

It takes the place of `F.cross_entropy` (and so of `nn.CrossEntropyLoss`) for such logits; what it cannot do divided
(class weights, targets that are probabilities) is computed from the whole logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from argosy.parallel.tensor.crossing import plain, unwrap


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """As `F.cross_entropy`; the logits are a DTensor. The loss is plain."""
    classes = 1 if input.dim() > 1 else 0
    divided = isinstance(input, DTensor) and input.placements == (Shard(classes),)
    if (
        not divided
        or weight is not None
        or target.is_floating_point()
        or size_average is not None
        or reduce is not None
    ):
        whole = None if weight is None else plain(weight)
        given = (whole, size_average, ignore_index, reduce, reduction, label_smoothing)
        return F.cross_entropy(plain(input), plain(target), *given)
    assert isinstance(input, DTensor)
    wanted = plain(target)
    local = unwrap(input).movedim(classes, -1)
    rows = local.reshape(-1, local.shape[-1])
    losses: Tensor = _Divided.apply(  # type: ignore[no-untyped-call]
        rows, wanted.reshape(-1), input.device_mesh, ignore_index, label_smoothing
    )
    if reduction == "none":
        return losses.view(wanted.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / (wanted != ignore_index).sum()


class _Divided(Function):
    """The loss of each row; a rank has some of its columns."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, target: Tensor, mesh: DeviceMesh, ignore_index: int, smoothing: float
    ) -> Tensor:
        group, width = mesh.get_group(), rows.shape[1]
        first, classes = mesh.get_local_rank() * width, width * mesh.size()
        counted = target != ignore_index
        if bool((((target < 0) | (target >= classes)) & counted).any()):
            raise IndexError(f"a target is outside the {classes} classes of the logits")
        logits = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
        largest = logits.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        shifted = logits - largest[:, None]
        mine = counted & (target >= first) & (target < first + width)
        column = torch.where(mine, target - first, 0)
        hit = shifted.gather(1, column[:, None])[:, 0].masked_fill(~mine, 0)
        mean = shifted.sum(1) / classes if smoothing else None
        powers = shifted.exp_()
        sums = torch.stack([powers.sum(1), hit] + ([mean] if mean is not None else []))
        dist.all_reduce(sums, group=group)
        logarithm = sums[0].log()
        losses = logarithm - sums[1]
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (logarithm - sums[2])
        ctx.save_for_backward(powers, sums[0], column, mine, counted)
        ctx.smoothing, ctx.classes, ctx.dtype = smoothing, classes, rows.dtype
        return losses.masked_fill(~counted, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        powers, sums, column, mine, counted = ctx.saved_tensors
        gradient = gradient * counted
        rows = powers * (gradient / sums)[:, None]
        if ctx.smoothing:
            rows -= (gradient * (ctx.smoothing / ctx.classes))[:, None]
        rows.scatter_add_(1, column[:, None], (gradient * mine * (ctx.smoothing - 1))[:, None])
        return rows.to(ctx.dtype), None, None, None, None
