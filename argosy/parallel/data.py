"""Synchronous data parallelism: every worker holds the whole model, and each step's gradient is the whole job's.

`DataParallel` changes nothing about the model but to listen: it broadcasts parameters and buffers from rank 0 once,
then, at the end of every backward pass, replaces each gradient by the mean over all samples of all workers. So what
stands between `backward()` and `optimizer.step()`, clipping for instance, sees what it would see in one process.

[Note: weighted by samples]
A script's loss is a mean over its batch. If worker r holds n_r of the step's N samples, the gradient that one process
would have computed is sum_r (n_r / N) g_r: weighted by samples, not by workers. Buffers that have changed follow the
same rule (`buffers.py`). A worker with no sample adds exact zeros, whatever its gradients hold (`nothing.py`).

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
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from argosy.comm.agree import check_agreement
from argosy.comm.group import Group
from argosy.data.cursor import Cursor
from argosy.parallel.buffers import Buffers
from argosy.parallel.nothing import tolerate_empty_batches


class DataParallel:
    """Keeps one model's replicas the same on all workers of a group. `number` tells it from the job's other models."""

    def __init__(self, model: nn.Module, group: Group, cursor: Cursor, number: int = 0) -> None:
        self._model, self._group, self._cursor, self._number = model, group, cursor, number
        self._hooks: list[RemovableHandle] = []
        self._listening: set[nn.Parameter] = set()
        self._passes: set[int] = set()
        self._buckets: dict[torch.dtype, Tensor] = {}
        _refuse_unready(model)
        check_agreement(f"the parameters and buffers of {type(model).__name__}", outline(model), group)
        for tensor in (*model.parameters(), *model.buffers()):
            broadcast_tensor(tensor, group)
        self._buffers = Buffers(model)
        self._listen()
        # A frozen parameter may be unfrozen during training: look again at every forward pass.
        self._hooks.append(model.register_forward_pre_hook(lambda *_: self._listen()))
        if group.size > 1:
            self._hooks += tolerate_empty_batches(model, lambda: cursor.samples == 0)

    def close(self) -> None:
        """Listen no more: the model is the script's alone again."""
        for hook in self._hooks:
            hook.remove()

    def _listen(self) -> None:
        for parameter in self._model.parameters():
            if parameter.requires_grad and parameter not in self._listening:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._arrived))
                self._listening.add(parameter)

    def _arrived(self, _: Tensor) -> None:
        """A gradient is there: when this backward pass has ended, all of them are."""
        autograd: Any = torch._C
        this_pass = autograd._current_graph_task_id()
        if this_pass not in self._passes:
            self._passes.add(this_pass)
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._ended(this_pass))

    def _ended(self, this_pass: int) -> None:
        self._passes.discard(this_pass)
        if self._group.size > 1:
            self._reduce()
        elif self._cursor.loss is not None:
            self._cursor.mean_loss = self._cursor.take_loss()

    def _reduce(self) -> None:
        """Replace gradients, and buffers that have changed, by their means, weighted by samples."""
        self._cursor.check_one_weight()
        named = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        _refuse_sparse(named)
        buffers = self._buffers.all()
        used = [parameter.grad is not None for _, parameter in named]
        weight, flags = self._count([*used, *self._buffers.changed()])
        for (_, parameter), users in zip(named, flags, strict=False):
            if users and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for _, parameter in named if parameter.grad is not None]
        drifted = [buffer for buffer, changes in zip(buffers, flags[len(named) :], strict=True) if changes]
        # Through `data`: a graph that is kept for another backward pass may hold the buffer, at the version it has.
        self._average([*gradients, *(buffer.data for buffer in drifted if buffer.is_floating_point())], weight)
        for buffer in drifted:
            if not buffer.is_floating_point():
                broadcast_tensor(buffer.data, self._group)
        self._buffers.note()

    def _count(self, flags: list[bool]) -> tuple[float, list[float]]:
        """This worker's weight, and how many workers raise each flag; the mean loss comes with it.

        Workers that are not at the same batch would average what does not belong together: it is checked here.
        """
        samples, loss, at = self._cursor.samples, self._cursor.take_loss(), self._cursor.at
        place = [self._number, *((at.epoch, at.step) if at else (-1, -1))]
        reported = samples if loss is not None else 0
        numbers = [samples, reported, loss * reported if loss and reported else 0.0, *place, *flags]
        sums = torch.tensor(numbers, dtype=torch.float64)
        self._group.all_reduce(sums)
        total, reporters, losses = sums[:3].tolist()
        if sums[3:6].tolist() != [self._group.size * where for where in place]:
            where = f"batch {at.step} of epoch {at.epoch}" if at else "a batch of no distributed loader"
            raise RuntimeError(
                f"workers are out of step: rank {self._group.rank} has run backward on {where}, and others elsewhere; "
                f"all must run backward on the same batches (a `continue` on some workers only, say, leaves one out)"
            )
        if reporters:
            self._cursor.mean_loss = losses / reporters
        return samples / total, sums[6:].tolist()

    def _average(self, tensors: Iterable[Tensor], weight: float) -> None:
        """All-reduce the tensors, each scaled by this worker's weight, in one buffer for each type of number."""
        by_type = defaultdict(list)
        for tensor in tensors:
            by_type[tensor.dtype].append(tensor)
        for dtype, members in by_type.items():
            flat = self._bucket(sum(member.numel() for member in members), dtype)
            if weight:
                torch.cat([member.detach().reshape(-1).cpu() for member in members], out=flat)
                flat.mul_(weight)
            else:
                flat.zero_()
            self._group.all_reduce(flat)
            parts = flat.split([member.numel() for member in members])
            with torch.no_grad():
                for member, part in zip(members, parts, strict=True):
                    member.copy_(part.view_as(member))

    def _bucket(self, count: int, dtype: torch.dtype) -> Tensor:
        """Room for so many numbers, where the group reduces them fastest; kept from step to step."""
        kept = self._buckets.get(dtype)
        if kept is None or kept.numel() < count:
            kept = self._buckets[dtype] = self._group.empty(count, dtype=dtype)
        return kept[:count]


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


def _refuse_sparse(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    for name, parameter in named:
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise NotImplementedError(
                f"the gradient of {name} is sparse, which data parallelism does not average; use sparse=False"
            )


def _refuse_unready(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"parameter {name} has no shape yet; run one batch through the model before distribute")
