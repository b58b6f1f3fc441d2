"""The learning rate of a large batch: scaled by a rule that the user has named, and warmed up.

The linear rule and its warm-up are those of Goyal et al., "Accurate, Large Minibatch SGD" (2017).

[Note: the script's own numbers]
A learning rate is multiplied when a step of the optimizer begins, and set back when it ends. So between steps the
script finds what it has set: schedulers, which read and write `group["lr"]`, compute what they would alone, and a
checkpoint holds the script's numbers, whatever rule a later run chooses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from argosy.config import ConfigError
from argosy.optim.config import OptimConfig
from argosy.optim.gradients import takes_step


class LearningRate:
    """Scales and warms up the learning rates of one optimizer.

    `steps_in(n)` is the number of steps in the first n epochs, for a warm-up that is told in epochs. `batch_now()` is
    the global batch of the step in hand, for a batch that changes during training: the rule follows it.

    >>> import torch
    >>> net = torch.nn.Linear(1, 1)
    >>> sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> rate = LearningRate(OptimConfig(lr_scale="linear", warmup="5epochs"), 128, 1024, lambda epochs: 8 * epochs)
    >>> _ = rate.attach(sgd)
    >>> rate.line()
    'learning rate 0.8 = 0.1 x 8 (lr_scale=linear: batch 1024 / 128), warm-up from 0.1 over 5 epochs = 40 steps'
    """

    def __init__(
        self,
        config: OptimConfig,
        script_batch: int | None = None,
        global_batch: int | None = None,
        steps_in: Callable[[int], int] | None = None,
        batch_now: Callable[[], int | None] | None = None,
        later: Callable[[LearningRate], None] | None = None,
    ) -> None:
        """`later`, if the batches are not known yet: it is called as the first step begins, and calls `go_by`."""
        self._config, self._later = config, later
        self.steps = 0  # that the optimizer has taken
        self._optimizer: Optimizer | None = None
        self._counts: Callable[[], bool] | None = None
        self._hooks: list[RemovableHandle] = []
        self._changed: list[tuple[dict[str, Any], Any, Any]] = []  # group, the script's rate, that of the step
        if later is None:
            self.go_by(script_batch, global_batch, steps_in, batch_now)

    def go_by(
        self,
        script_batch: int | None,
        global_batch: int | None,
        steps_in: Callable[[int], int] | None,
        batch_now: Callable[[], int | None] | None,
    ) -> None:
        """Learn which batches the optimizer trains on."""
        self._script_batch, self._global_batch, self._batch_now = script_batch, global_batch, batch_now
        self._warmup_steps = _warmup_steps(self._config, steps_in)
        if self._config.lr_scale != "none" and not (script_batch and global_batch):
            fix = "the rule compares batches, and no DataLoader with a batch_size was distributed; distribute one first"
            raise ConfigError("lr_scale", self._config.lr_scale, fix)

    @property
    def active(self) -> bool:
        """Whether the user has asked for anything."""
        return self._config.lr_scale != "none" or self._config.warmup_span() is not None

    def attach(self, optimizer: Optimizer, counts: Callable[[], bool] | None = None) -> LearningRate:
        """From now on, scale the steps of this optimizer: those for which there are gradients, or that `counts` says.

        A worker of a pipeline may hold nothing that is trained, and counts the steps of the others.
        """
        self._optimizer, self._counts = optimizer, counts
        if self.active:
            self._hooks = [
                optimizer.register_step_pre_hook(self._begin),
                optimizer.register_step_post_hook(self._end),
            ]
        return self

    def close(self) -> None:
        """Leave the optimizer to the script again."""
        for hook in self._hooks:
            hook.remove()
        self._restore()

    def factor(self, step: int) -> float:
        """What learning rates are multiplied by in a step, counted from 0.

        Warm-up rises by equal amounts: from the script's rate to the scaled one or, if no rule scales, from near zero.
        """
        goal = self._goal(self._batch_now() if self._batch_now is not None else None)
        if step >= self._warmup_steps:
            return goal
        risen = (step + 1) / self._warmup_steps
        return risen if self._config.lr_scale == "none" else 1 + (goal - 1) * risen

    def line(self) -> str | None:
        """The arithmetic for the user, once attached; None if nothing was asked for."""
        if not self.active or self._optimizer is None or self._later is not None:
            return None
        own = list(dict.fromkeys(float(group["lr"]) for group in self._optimizer.param_groups))
        goal, rule = self._goal(), self._config.lr_scale
        line = f"learning rate {_numbers(rate * goal for rate in own)}"
        if rule != "none":
            root = "the root of " if rule == "sqrt" else ""
            follows = ", which grows" if self._batch_now is not None and self._batch_now() != self._global_batch else ""
            batches = f"{root}batch {self._global_batch} / {self._script_batch}{follows}"
            line += f" = {_numbers(own)} x {goal:.4g} (lr_scale={rule}: {batches})"
        span = self._config.warmup_span()
        if span is not None:
            told = f"{span}" if span.unit == "steps" else f"{span} = {self._warmup_steps} steps"
            line += f", warm-up from {_numbers(own if rule != 'none' else [0.0])} over {told}"
        return line

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the steps taken, and so how far the warm-up is."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after so many steps."""
        self.steps = int(state["steps"])

    def _goal(self, batch: int | None = None) -> float:
        """The factor once warmed up, for the batch given or the whole one."""
        if self._config.lr_scale == "none" or not self._script_batch or not self._global_batch:
            return 1.0
        times = (batch or self._global_batch) / self._script_batch
        return times if self._config.lr_scale == "linear" else math.sqrt(times)

    def _begin(self, optimizer: Optimizer, *_: Any) -> None:
        self._restore()  # the step before may have failed between the two hooks
        if self._later is not None:
            later, self._later = self._later, None
            later(self)
        factor = self.factor(self.steps)
        for group in optimizer.param_groups:
            own = group["lr"]
            if isinstance(own, Tensor):  # in place: a captured or compiled step reads this very tensor
                self._changed.append((group, own.clone(), own.mul_(factor).clone()))
            else:
                group["lr"] = own * factor
                self._changed.append((group, own, group["lr"]))

    def _end(self, optimizer: Optimizer, *_: Any) -> None:
        self._restore()
        self.steps += takes_step(optimizer) if self._counts is None else self._counts()

    def _restore(self) -> None:
        for group, own, ours in self._changed:
            now = group["lr"]
            if bool(now != ours):
                continue  # it was set during the step: what the script says last holds
            if isinstance(now, Tensor):
                now.copy_(own)
            else:
                group["lr"] = own
        self._changed.clear()


def _warmup_steps(config: OptimConfig, steps_in: Callable[[int], int] | None) -> int:
    span = config.warmup_span()
    if span is None:
        return 0
    if span.unit == "steps":
        return span.count
    if steps_in is None:
        fix = "no DataLoader was distributed, so epochs have no length; distribute it, or say steps: warmup=500"
        raise ConfigError("warmup", config.warmup, fix)
    return steps_in(span.count)


def _numbers(values: Any) -> str:
    return ", ".join(f"{value:.6g}" for value in values)
