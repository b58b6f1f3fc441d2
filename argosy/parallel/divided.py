"""Models in parts: no worker holds all of the parameters, and each step's gradient is still the whole job's.

Stages 2 and 3 of sharding are torch's `fully_shard`: it gathers a module's parameters when it runs and scatters its
gradients when they are there. Stage 2 keeps gathered parameters from forward until backward, stage 3 gives them back in
between. Layers may be divided besides (`tensor/`). The model stays the object that the script knows. Its parameters are
DTensors, so clipping and optimizers see whole numbers and hold parts.

[Note: weighted at the output]
torch takes the plain mean over workers. A script's loss is a mean over its batch, so what is due is the mean weighted
by samples (see [Note: weighted by samples]). Everything behind the model's output is linear in the gradient that enters
there: multiplied by this worker's samples over the mean of all workers', it makes every gradient come out so. What goes
on through the model's inputs, into another model, is divided by the same again. The script gets outputs of their own:
those that the model uses itself, for its other outputs, are not multiplied twice. In `fleet.step`, where the loss
itself is multiplied, parameters count that are used outside of the model, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from argosy.comm.group import Group
from argosy.data.cursor import Cursor
from argosy.parallel.aside import Aside
from argosy.parallel.buffers import Buffers, average
from argosy.parallel.hooks import Hook
from argosy.parallel.meeting import Meeting
from argosy.parallel.nothing import tolerate_empty_batches
from argosy.parallel.passes import Member, SharedPasses


def times(value: Any, weight: float) -> Any:
    """A tensor as it is, whose gradient is multiplied by a weight where it goes on; anything else as it is."""
    if not isinstance(value, Tensor) or not value.requires_grad:
        return value
    if isinstance(value, DTensor):  # of which another object would not be the same to everybody
        value.register_hook(lambda gradient: _times(gradient, weight))
        return value
    other = value.view_as(value)
    other.register_hook(lambda gradient: _times(gradient, weight))
    return other


def _times(gradient: Tensor, weight: float) -> Tensor:
    return gradient * weight if weight else torch.zeros_like(gradient)


class Divided(Member):
    """A model in parts, in training. `readers` is among how many the samples are divided."""

    def __init__(
        self, model: nn.Module, group: Group, cursor: Cursor, number: int, readers: int, passes: SharedPasses
    ) -> None:
        self.model = model
        self._sharded = model if isinstance(model, FSDPModule) else None
        self._group, self._cursor, self._readers, self._passes = group, cursor, readers, passes
        self._meeting = Meeting(group, cursor, number)
        self._buffers = Buffers(model)
        self._aside = Aside(model, cursor)
        self._quiet = self._by_loss = False
        passes.join(self)
        self._hooks: list[RemovableHandle] = [
            *tolerate_empty_batches(model, lambda: cursor.samples == 0),
            model.register_forward_pre_hook(Hook(lambda *_: passes.look()), prepend=True),
            model.register_forward_pre_hook(Hook(self._entering), with_kwargs=True),
            # After torch's own: backward then reaches torch's hook on the output first, and its end comes before ours.
            model.register_forward_hook(Hook(self._ran)),
        ]

    def close(self) -> None:
        """Listen no more. The model stays sharded."""
        for hook in self._hooks:
            hook.remove()
        self._passes.leave(self)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block add whole gradients up on each worker, and reduce nothing."""
        before, self._quiet = self._quiet, True
        self._reduce_gradients(False)
        try:
            yield
        finally:
            self._quiet = before
            self._reduce_gradients(not before)

    def _reduce_gradients(self, reduce: bool) -> None:
        if self._sharded is not None:
            self._sharded.set_requires_gradient_sync(reduce)

    @property
    def weight(self) -> float:
        """This worker's samples over the mean of all workers'."""
        return self._cursor.share(self._readers) * self._readers

    @contextmanager
    def weighted_by_loss(self) -> Iterator[None]:
        """In this block the loss has the weight already."""
        before, self._by_loss = self._by_loss, True
        try:
            yield
        finally:
            self._by_loss = before

    def _entering(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        weight = 1.0 if self._by_loss else self.weight
        if weight in (0, 1) or not torch.is_grad_enabled():
            return None
        return pytree.tree_map(lambda value: times(value, 1 / weight), (args, kwargs))

    def _ran(self, _: nn.Module, __: Any, output: Any) -> Any:
        for value in pytree.tree_leaves(output):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(self._entered)
        weight = 1.0 if self._by_loss else self.weight
        return None if weight == 1 else pytree.tree_map(lambda value: times(value, weight), output)

    def _entered(self, _: Tensor) -> None:
        """A backward pass reaches the model's output."""
        if not self._quiet and self._passes.reach(self, self._cursor):
            self._aside.begin()

    def _whole(self) -> list[nn.Parameter]:
        """What torch has not divided: single numbers."""
        if self._sharded is None:
            return []
        return [each for each in self.model.parameters() if each.requires_grad and not isinstance(each, DTensor)]

    @torch.no_grad()
    def _average(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        average([cast(Tensor, each.grad) for each in parameters], 1 / self._group.size, self._group)

    def aborted(self) -> None:
        """Forget the gradients of a pass that has failed, and what torch had under way."""
        self._aside.forget()
        if self._sharded is not None:
            self._sharded.reset_iter_state()
        for parameter in self.model.parameters():
            parameter.grad = None

    def ended(self) -> None:
        """torch has reduced the gradients of a pass: put them aside, or tell what goes with a step."""
        if not self._cursor.closes:
            self._cursor.keep_loss()
            self._aside.put()
            return
        self._cursor.check_one_weight()
        self._aside.take()
        with self._cursor.waiting():
            whole = self._whole()
            told = self._meeting.exchange([*(each.grad is not None for each in whole), *self._buffers.changed()])
            users, changed = told[: len(whole)], told[len(whole) :]
            self._average([each for each, count in zip(whole, users, strict=True) if count])
            buffers = [b.data for b, users in zip(self._buffers.all(), changed, strict=True) if users]
            average(buffers, self._cursor.part(self._readers) * self._readers / self._group.size, self._group)
        self._buffers.note()
