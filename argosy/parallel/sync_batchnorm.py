"""Batch normalisation over the whole job's batch: `sync_batchnorm=true`.

A batch-norm layer computes mean and variance over its worker's samples. With small shares these are noisy, and differ
from what one process would compute. Here the sums are added up over the workers, forward and backward, so that the
result is that of one process on the whole batch. torch's own SyncBatchNorm works on GPUs only.

Layers stay the objects they were; only their `forward`, while training, is another. A worker without a sample adds
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from argosy.comm.engine import EngineGroup
from argosy.data.cursor import Cursor


class Forward:
    """A replaced `forward`, as a handle that puts the layer's own back."""

    def __init__(self, layer: _BatchNorm, group: EngineGroup, cursor: Cursor) -> None:
        self._layer, self._group, self._cursor = layer, group, cursor
        self._own = layer.forward
        layer.forward = self  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        """Let the layer be as it was."""
        self._layer.__dict__.pop("forward", None)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the layer, or a pickle, has its class's own."""
        return getattr, (self._layer, "forward")

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise a batch."""
        layer = self._layer
        uses_batch = layer.training or (layer.running_mean is None and layer.running_var is None)
        if not uses_batch:
            return self._own(x)
        layer._check_input_dim(x)
        over = [dim for dim in range(x.dim()) if dim != 1]
        weight = layer.weight if layer.weight is not None else x.new_ones(x.shape[1])
        bias = layer.bias if layer.bias is not None else x.new_zeros(x.shape[1])
        normalise: Any = _Normalise.apply
        y, mean, variance, count = normalise(x, weight, bias, layer.eps, over, self._add_up, self._share)
        if layer.training and layer.running_mean is not None and layer.running_var is not None:
            self._track(mean, variance, count)
        return cast(Tensor, y)

    @property
    def _share(self) -> float:
        """How much of the job's batch this worker has."""
        return self._cursor.share(self._group.size)

    def _add_up(self, sums: Tensor) -> None:
        with self._cursor.waiting(meets=False):
            self._group.all_reduce(sums)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        layer = self._layer
        assert layer.running_mean is not None
        assert layer.running_var is not None
        assert layer.num_batches_tracked is not None
        layer.num_batches_tracked.add_(1)
        momentum = layer.momentum if layer.momentum is not None else 1 / float(layer.num_batches_tracked)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), momentum)
        layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), momentum)


class _Normalise(torch.autograd.Function):
    """Batch norm whose sums go over all workers. With s = 1 / sqrt(var + eps) and x' = (x - mean) s:

    dx = w s (dy - (sum dy + x' sum(dy x')) / n), the sums over the whole job's batch.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        over: list[int],
        add_up: Callable[[Tensor], None],
        share: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels = x.shape[1]
        each = x.numel() / channels
        variance, mean = (part.double() for part in torch.var_mean(x, over, correction=0))
        sums = torch.cat([mean, variance + mean * mean, mean.new_ones(1)]) * each
        if not share:
            sums.zero_()
        add_up(sums)
        count = sums[-1]
        if float(count) <= 1:
            raise ValueError(f"batch norm over the whole job needs more than one value per channel, got {float(count)}")
        mean = sums[:channels] / count
        variance = (sums[channels:-1] / count - mean * mean).clamp_(min=0)
        scale = (variance + eps).rsqrt().to(x.dtype)
        shape = [1, channels, *[1] * (x.dim() - 2)]
        normal = (x - mean.to(x.dtype).view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, weight, scale, count)
        ctx.over, ctx.shape, ctx.share, ctx.add_up = over, shape, share, add_up
        ctx.mark_non_differentiable(mean, variance, count)
        return normal * weight.view(shape) + bias.view(shape), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor | None, ...]:
        dy = outputs[0]
        normal, weight, scale, count = ctx.saved_tensors
        d_bias, d_weight = dy.sum(ctx.over), (dy * normal).sum(ctx.over)
        sums = torch.cat([d_bias, d_weight]).double()
        # The job's loss is the sum of the workers' losses, each times its share; this worker's gradients will be
        # multiplied by its share in the end, so what comes from others is divided by it here.
        sums = sums * ctx.share if ctx.share else torch.zeros_like(sums)
        ctx.add_up(sums)
        sums = sums / ctx.share if ctx.share else sums
        mean_bias, mean_weight = ((part / count).to(dy.dtype).view(ctx.shape) for part in sums.chunk(2))
        dx = weight.view(ctx.shape) * scale.view(ctx.shape) * (dy - mean_bias - normal * mean_weight)
        return dx, d_weight, d_bias, None, None, None, None


def synchronise_statistics(model: nn.Module, group: EngineGroup, cursor: Cursor) -> list[Forward]:
    """Let all batch-norm layers of the model work on the whole job's batch, of which a worker has a share."""
    return [Forward(module, group, cursor) for module in model.modules() if isinstance(module, _BatchNorm)]
