"""Synchronous data parallelism: every worker holds the whole model, and each step's gradient is the whole job's.

`DataParallel` changes nothing about the model but to listen: it broadcasts parameters and buffers from rank 0 once,
then, at the end of every backward pass, replaces each gradient by the mean over all samples of all workers. So what
stands between `backward()` and `optimizer.step()`, clipping for instance, sees what it would see in one process.

[Note: weighted by samples]
A script's loss is a mean over its batch. If worker r holds n_r of the step's N samples, the gradient that one process
would have computed is sum_r (n_r / N) g_r: weighted by samples, not by workers. Running statistics of normalisation
layers are averaged by the same rule, so that replicas stay the same. A worker with no sample adds exact zeros,
whatever its gradients hold (`nothing.py`).

[Note: accumulating]
Calling backward twice before a step reduces twice. That is right, if wasteful: the weights sum to one, so what is
already averaged, and equal on all workers, comes out of the second average as it went in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from argosy.comm.agree import check_agreement
from argosy.comm.group import Group
from argosy.data.cursor import Cursor
from argosy.parallel.nothing import tolerate_empty_batches


class DataParallel:
    """Keeps one model's replicas the same on all workers of a group."""

    def __init__(self, model: nn.Module, group: Group, cursor: Cursor) -> None:
        self._model, self._group, self._cursor = model, group, cursor
        self._listening: set[nn.Parameter] = set()
        self._queued = False
        _refuse_unready(model)
        check_agreement(f"the parameters and buffers of {type(model).__name__}", outline(model), group)
        for tensor in (*model.parameters(), *model.buffers()):
            broadcast_tensor(tensor, group)
        self._listen()
        # A frozen parameter may be unfrozen during training: look again at every forward pass.
        model.register_forward_pre_hook(lambda *_: self._listen())
        if group.size > 1:
            tolerate_empty_batches(model, lambda: cursor.samples == 0)

    def _listen(self) -> None:
        self._queued = False  # a backward pass that failed half-way has left it set
        for parameter in self._model.parameters():
            if parameter.requires_grad and parameter not in self._listening:
                parameter.register_post_accumulate_grad_hook(self._arrived)
                self._listening.add(parameter)

    def _arrived(self, _: Tensor) -> None:
        if not self._queued:
            self._queued = True
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._reduce)

    def _reduce(self) -> None:
        """Replace gradients and running statistics by their means, weighted by samples."""
        self._queued = False
        if self._group.size == 1:
            self._cursor.mean_loss = self._cursor.take_loss()
            return
        samples = self._cursor.samples
        named = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        used = [parameter.grad is not None for _, parameter in named]
        for name, parameter in named:
            if parameter.grad is not None and parameter.grad.layout != torch.strided:
                raise NotImplementedError(
                    f"the gradient of {name} is sparse, which data parallelism does not average; use sparse=False"
                )
        totals = self._count(samples, used)
        for (_, parameter), users in zip(named, totals, strict=True):
            if users and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for _, parameter in named if parameter.grad is not None]
        self._average([*gradients, *running_statistics(self._model)], samples / self._total)

    def _count(self, samples: float, used: list[bool]) -> list[float]:
        """Sum over the workers: samples, reported losses, and who used which parameter; keep the mean loss."""
        loss = self._cursor.take_loss()
        weight = samples if loss is not None else 0
        numbers = [samples, weight, loss * weight if loss is not None and weight else 0.0, *map(float, used)]
        sums = torch.tensor(numbers, dtype=torch.float64)
        self._group.all_reduce(sums)
        self._total, reporters, losses, *users = sums.tolist()
        self._cursor.mean_loss = losses / reporters if reporters else None
        return users

    def _average(self, tensors: Iterable[Tensor], weight: float) -> None:
        """All-reduce the tensors, each scaled by this worker's weight, in one buffer for each type of number."""
        by_type = defaultdict(list)
        for tensor in tensors:
            by_type[tensor.dtype].append(tensor)
        for dtype, members in by_type.items():
            flat = torch.zeros(sum(member.numel() for member in members), dtype=dtype)
            if weight:
                torch.cat([member.detach().reshape(-1).cpu() for member in members], out=flat)
                flat.mul_(weight)
            self._group.all_reduce(flat)
            parts = flat.split([member.numel() for member in members])
            with torch.no_grad():
                for member, part in zip(members, parts, strict=True):
                    member.copy_(part.view_as(member))


def running_statistics(model: nn.Module) -> list[Tensor]:
    """The running means and variances of the normalisation layers that are learning them."""
    layers = [module for module in model.modules() if isinstance(module, _NormBase) and module.training]
    return [value for layer in layers for value in (layer.running_mean, layer.running_var) if value is not None]


def broadcast_tensor(tensor: Tensor, group: Group) -> None:
    """Replace a tensor of any type and device by that of rank 0."""
    if tensor.numel() == 0 or group.size == 1:
        return
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    group.broadcast(raw)
    with torch.no_grad():
        tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))


def outline(model: nn.Module) -> list[str]:
    """The names, shapes and types of a model's tensors: what replicas must have in common."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [f"{name} {tuple(value.shape)} {value.dtype}" for name, value in tensors.items()]


def _refuse_unready(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"parameter {name} has no shape yet; run one batch through the model before distribute")
