"""Steps in one pass: torch's fused optimizers, where the script leaves the choice to torch.

An optimizer's step is as fast as memory, and torch's default on a CPU reads and writes it several times: fused steps
do once (`bench/data_parallel.py --only adamw` measures what that is worth). On GPUs torch chooses well by itself.
Where a script says neither `foreach=` nor `fused=`, steps are fused here; results differ by rounding, and those of SGD
without momentum not at all. What `optimizer.param_groups` says, checkpoints too, stays as it was: it says otherwise
only while the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from argosy.optim.step_hooks import StepHooks

_HAVE: Final = (SGD, Adam, AdamW, Adagrad)


class Fused:
    """Fuses an optimizer's steps until it is closed. Other optimizers than torch's own are left alone."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._fused: list[dict[str, Any]] = []
        self._hooks: StepHooks | None = None
        if type(optimizer) in _HAVE:
            self._hooks = StepHooks(optimizer, self._begin, self._stepped)
            self._saving = optimizer.register_state_dict_pre_hook(lambda *_: self._end())

    def close(self) -> None:
        """Leave the optimizer to itself."""
        self._end()
        if self._hooks is not None:
            self._hooks.remove()
            self._saving.remove()

    def _begin(self, has_closure: bool) -> None:
        self._end()  # a step that has raised is followed by no hook
        assert self._hooks is not None
        if has_closure or not self._hooks.are_nearest:
            return  # closures, and hooks that are still to come, make gradients of whatever kind
        for group in self._optimizer.param_groups:
            stepping = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._optimizer.state.get(parameter, {}) for parameter in stepping]
            if _is_open(group) and all(map(_suits, stepping, states)) and _began_together(states):
                group["fused"] = True
                self._fused.append(group)

    def _stepped(self) -> None:
        self._end()
        assert self._hooks is not None
        self._hooks.come_nearest()

    def _end(self) -> None:
        for group in self._fused:
            group["fused"] = None
        self._fused.clear()


def _is_open(group: dict[str, Any]) -> bool:
    """Whether the script has chosen nothing that decides how a step is made."""
    asked = group["differentiable"] or group.get("capturable") or isinstance(group["lr"], Tensor)
    return group["fused"] is None and group["foreach"] is None and not asked


def _suits(parameter: Tensor, state: Mapping[str, Any]) -> bool:
    """Fused steps go through memory in order, and take numbers as they lie there: all must lie alike."""
    gradient = parameter.grad
    if gradient is None or gradient.layout != torch.strided or type(parameter) not in (nn.Parameter, Tensor):
        return False
    dtype = parameter.dtype
    if dtype is not torch.float32 and dtype is not torch.float64:
        return False
    for each in (parameter, gradient, *state.values()):
        # What is a number for the whole tensor, a count of steps say, may lie anywhere.
        if (
            isinstance(each, Tensor)
            and (each.dim() or each is parameter)
            and not (each.is_cpu and each.is_contiguous() and each.dtype is dtype)
        ):
            return False
    return True


def _began_together(states: Sequence[Mapping[str, Any]]) -> bool:
    """SGD makes momentum in the first step: fused, it makes that of all parameters, or of none."""
    return len({state.get("momentum_buffer") is None for state in states}) < 2
