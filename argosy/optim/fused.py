"""Steps in one pass: torch's fused optimizers, where the script leaves the choice to torch.

An optimizer's step is as fast as memory, and torch's default on a CPU reads and writes it several times: fused steps
do once (`bench/data_parallel.py --only adamw` measures what that is worth). On GPUs torch chooses well by itself.
Where a script says neither `foreach=` nor `fused=`, steps are fused here; results differ by rounding, and those of SGD
without momentum not at all. What `optimizer.param_groups` says, checkpoints too, stays as it was: it says otherwise
only while the optimizer steps.

Of parameters that are divided among workers (DTensors), torch's default is one by one, and each operation on one costs
more than it computes: their steps are fused too, on any device, and where they cannot be, made all at once (`foreach`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from argosy.optim.step_hooks import StepHooks

_HAVE: Final = (SGD, Adam, AdamW, Adagrad)


class Fused:
    """Fuses an optimizer's steps until it is closed. Whole parameters of others than torch's own are left alone."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._chosen: list[tuple[dict[str, Any], str]] = []
        self._hooks: StepHooks | None = None
        if "foreach" in optimizer.defaults:
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
        if not self._hooks.are_nearest:
            return  # hooks that are still to come make gradients of whatever kind, and see the script's own choice
        for group in self._optimizer.param_groups:
            divided = [isinstance(parameter, DTensor) for parameter in group["params"] if parameter.dim()]
            if not (any(divided) or type(self._optimizer) in _HAVE) or not _is_open(group):
                continue
            if not has_closure and self._can_fuse(group["params"]):
                self._choose(group, "fused")
            elif divided and all(divided):
                self._choose(group, "foreach")

    def _can_fuse(self, parameters: Sequence[Tensor]) -> bool:
        if type(self._optimizer) not in _HAVE:
            return False
        stepping = [parameter for parameter in parameters if parameter.grad is not None]
        states = [self._optimizer.state.get(parameter, {}) for parameter in stepping]
        if not all(map(_suits, stepping, states)) or not _began_together(states):
            return False
        meshes = {parameter.device_mesh if isinstance(parameter, DTensor) else None for parameter in stepping}
        if meshes - {None}:
            _teach_dtensor()
        return len(meshes) < 2

    def _choose(self, group: dict[str, Any], way: str) -> None:
        group[way] = True
        self._chosen.append((group, way))

    def _stepped(self) -> None:
        self._end()
        assert self._hooks is not None
        self._hooks.come_nearest()

    def _end(self) -> None:
        for group, way in self._chosen:
            group[way] = None
        self._chosen.clear()


def _is_open(group: dict[str, Any]) -> bool:
    """Whether the script has chosen nothing that decides how a step is made."""
    numbers = (group.get("lr"), *group.get("betas", ()))
    asked = group.get("differentiable") or group.get("capturable") or any(isinstance(each, Tensor) for each in numbers)
    return group.get("fused") is None and group.get("foreach", False) is None and not asked


def _suits(parameter: Tensor, state: Mapping[str, Any]) -> bool:
    """Fused steps go through memory in order, and take numbers as they lie there: all must lie alike."""
    gradient = parameter.grad
    if gradient is None or gradient.layout != torch.strided:
        return False
    if type(parameter) not in (nn.Parameter, Tensor, DTensor) or parameter.dtype not in (torch.float32, torch.float64):
        return False
    states = [each for each in state.values() if isinstance(each, Tensor)]
    return all(_lies_like(each, parameter) for each in (parameter, gradient, *states))


def _lies_like(each: Tensor, parameter: Tensor) -> bool:
    if not each.dim() and each is not parameter and each is not parameter.grad:
        # A number for the whole tensor, a count of steps say, may lie anywhere on a CPU; other devices want it there.
        return parameter.is_cpu or each.device == parameter.device
    if each.dtype is not parameter.dtype:
        return False
    if not isinstance(parameter, DTensor):
        return each.is_cpu and each.is_contiguous()
    if not isinstance(each, DTensor) or each.placements != parameter.placements:
        return False
    same_mesh = each.device_mesh is parameter.device_mesh or each.device_mesh == parameter.device_mesh
    return same_mesh and each._local_tensor.is_contiguous()


def _began_together(states: Sequence[Mapping[str, Any]]) -> bool:
    """SGD makes momentum in the first step: fused, it makes that of all parameters, or of none."""
    return len({state.get("momentum_buffer") is None for state in states}) < 2


@cache
def _teach_dtensor() -> None:
    """Let torch know that fused steps go element by element: of the parts of DTensors, too. It knows it of Adam's."""
    from torch.distributed.tensor._ops._pointwise_ops import _register_single_dim_pointwise

    _register_single_dim_pointwise(torch.ops.aten._fused_sgd_.default)
    _register_single_dim_pointwise(torch.ops.aten._fused_adagrad_.default)
