"""Backward passes: when the gradients of one are all there, of one model, or of all that take part in it.

[Note: several models]
Operations of a group must be started in the same order by all its members. Of two models in one pass (a GAN's, an
encoder and a decoder) one worker may see the gradients of the one first, and another worker those of the other, or none
of them. So with several models nothing is started before the pass has ended; then the workers tell each other which
models took part, and these are reduced in the order in which they were distributed.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.utils.hooks import RemovableHandle

from argosy.comm.group import Group
from argosy.data.cursor import Cursor
from argosy.parallel.hooks import Hook

_NONE: Final = -1  # no backward pass is under way


def at_end_of_pass(running: set[int], ended: Callable[[], None]) -> None:
    """From within a backward pass, have `ended` called once when it is over; `running` has those not over yet."""
    this_pass = _this_pass()
    if this_pass in running:
        return
    running.add(this_pass)

    def end() -> None:
        running.discard(this_pass)
        ended()

    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(end)


def _this_pass() -> int:
    autograd: Any = torch._C
    number: int = autograd._current_graph_task_id()
    return number


def _passes_of_this_thread() -> int:
    """How many backward passes this thread is in: more than one, if one runs another, as reentrant checkpointing does.

    None, if hooks run on a thread of autograd's own, as those of GPUs do.
    """
    running = _engine_run_backward.__code__
    frame, found = inspect.currentframe(), 0
    while frame is not None:
        found += frame.f_code is running
        frame = frame.f_back
    return found


class Passes:
    """Calls `ended` after each backward pass that has reached a parameter of the model."""

    def __init__(self, model: nn.Module, ended: Callable[[], None]) -> None:
        self._model, self._ended = model, ended
        self._listening: set[nn.Parameter] = set()
        self._running: set[int] = set()
        # A frozen parameter may be unfrozen during training: look again at every forward pass.
        self._hooks: list[RemovableHandle] = [model.register_forward_pre_hook(Hook(lambda *_: self._listen()))]
        self._listen()

    def close(self) -> None:
        """Listen no more."""
        for hook in self._hooks:
            hook.remove()

    def _listen(self) -> None:
        for parameter in self._model.parameters():
            if parameter.requires_grad and parameter not in self._listening:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._arrived))
                self._listening.add(parameter)

    def _arrived(self, _: Tensor) -> None:
        at_end_of_pass(self._running, self._ended)


class Member(ABC):
    """A model whose gradients are reduced when a pass has ended."""

    touched = False  # whether the pass under way has reached it

    @abstractmethod
    def ended(self) -> None:
        """A pass that this worker or another has taken the model through is over."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Passes in this block reduce nothing."""

    @abstractmethod
    def aborted(self) -> None:
        """The pass under way has failed, and will not end."""


class SharedPasses:
    """The backward passes of all models that are reduced over one group; see [Note: several models]."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._members: list[Member] = []
        self._running: set[int] = set()

    def join(self, member: Member) -> None:
        """Add a model; all workers add theirs in the same order."""
        self._members.append(member)

    def leave(self, member: Member) -> None:
        """Take a model out."""
        self._members.remove(member)

    @property
    def has_one_model(self) -> bool:
        """Whether gradients may be reduced before a pass has ended."""
        return len(self._members) == 1

    def reach(self, member: Member, cursor: Cursor) -> bool:
        """A gradient of a model has come; whether it is the model's first in this pass.

        Workers meet when the pass has ended, if the batch that the cursor is at closes a step.
        """
        if _this_pass() not in self._running:
            if self._running and _passes_of_this_thread() == 1:
                self._forget()
            closes = cursor.closes
            at_end_of_pass(self._running, lambda: self._end(closes))
        first, member.touched = not member.touched, True
        return first

    def look(self) -> None:
        """A forward pass begins. If no backward pass is under way, those that have not ended have failed."""
        if self._running and _this_pass() == _NONE:
            self._forget()

    def _forget(self) -> None:
        """Passes that have not ended have failed."""
        self._running.clear()
        for member in self._members:
            if member.touched:
                member.touched = False
                member.aborted()

    def _end(self, closes: bool) -> None:
        taking = [float(member.touched) for member in self._members]
        if closes and not self.has_one_model:
            anywhere = torch.tensor(taking)
            self._group.all_reduce(anywhere, "max")
            taking = anywhere.tolist()
        for member, takes_part in zip(list(self._members), taking, strict=True):
            member.touched = False
            if takes_part:
                member.ended()
