"""The gradients that an optimizer would step with now."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.optim import Optimizer


def gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    """Those of all parameters that have one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter.grad


def takes_step(optimizer: Optimizer) -> bool:
    """Whether `optimizer.step()` would do anything: while gradients are being gathered, there are none to step with."""
    return next(gradients(optimizer), None) is not None
