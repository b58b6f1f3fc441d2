"""Mixed precision: how a whole step goes in fp32, bf16 or fp16.

Parameters, gradients and the optimizer's state are fp32 in all three; the model computes in the type that was chosen
(`autocast.py`). fp16 also scales its loss (`loss_scale.py`), which the script's own `loss.backward()` cannot do. So
there the model refuses to be trained outside of a whole step, which is `fleet.step`, and so does its optimizer.

    with precision.whole_step():
        loss = loss_fn(model(x), y)
        precision.backward(loss)             # the gradients are reduced as backward ends
        stepped = precision.step(optimizer)  # False: not finite, on all workers alike
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from argosy.optim.autocast import Autocast, autocast_forward
from argosy.optim.config import OptimConfig
from argosy.optim.gradients import gradients, takes_step
from argosy.optim.loss_scale import LossScaler

_TYPES: Final[dict[str, torch.dtype | None]] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """What a job computes in.

    >>> net = nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> precision = Precision(OptimConfig(precision="fp16"))
    >>> _ = precision.attach(net)
    >>> with precision.whole_step():
    ...     precision.backward(net(torch.ones(2, 4)).mean() / 10)
    ...     precision.step(optimizer)
    True
    """

    def __init__(self, config: OptimConfig) -> None:
        self._dtype = _TYPES[config.precision]
        self.scaler = LossScaler() if self._dtype is torch.float16 else None
        self._inside = False
        self._finite: bool | None = None  # of the gradients now, if they have been looked at

    def attach(self, model: nn.Module) -> Autocast | None:
        """Let a model compute in this precision; the handle undoes it. None in fp32, where nothing is to be done."""
        if self._dtype is None:
            return None
        guard = functools.partial(self._refuse_outside, model) if self.scaler is not None else None
        return autocast_forward(model, self._dtype, guard)

    def guard(self, optimizer: Optimizer) -> RemovableHandle | None:
        """Refuse steps with gradients of a loss that was not scaled; the handle undoes it. None where none is scaled.

        A model that computes without dropout (`model.eval()`) may be called, and its gradients asked for: by whoever
        looks at what it has learnt. Trained it is by what steps.
        """
        if self.scaler is None:
            return None
        return optimizer.register_step_pre_hook(lambda *_: self._refuse_unscaled(optimizer))

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """Within, a model may be trained in fp16: the loss will be scaled."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`, with the loss scaled if need be."""
        self._finite = None
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def unscale_(self, optimizer: Optimizer) -> bool:
        """Make gradients what they are without the scale, before they are clipped, say; whether they are finite."""
        if self.scaler is None:
            return True
        if self._finite is None:
            self._finite = self.scaler.unscale_(gradients(optimizer))
        return self._finite

    def step(self, optimizer: Optimizer) -> bool:
        """Take a step, or skip it because a gradient is not finite; whether it was taken."""
        if self.scaler is None or not takes_step(optimizer):
            optimizer.step()
            return True
        finite = self.unscale_(optimizer)
        self._finite = None
        if finite:
            optimizer.step()
        self.scaler.update(finite)
        return finite

    @property
    def factor(self) -> float:
        """What gradients are multiplied by while they are reduced: the scale of the loss."""
        return self.scaler.factor if self.scaler is not None else 1.0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the scale of the loss."""
        return self.scaler.state_dict() if self.scaler is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with an earlier run's scale; one that had another precision has none."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)

    def _refuse_unscaled(self, optimizer: Optimizer) -> None:
        if not self._inside and takes_step(optimizer):
            raise RuntimeError(
                "precision=fp16 scales the loss, and this step has gradients of one that was not scaled: train with "
                "fleet.step(x, y, loss_fn), also after model.eval(); precision=bf16 needs none of this"
            )

    def _refuse_outside(self, model: nn.Module) -> None:
        if not self._inside and model.training and torch.is_grad_enabled():
            raise RuntimeError(
                "precision=fp16 scales the loss, so a whole step is one call: fleet.step(x, y, loss_fn); to evaluate, "
                "call the model after model.eval() or under torch.no_grad(); precision=bf16 needs none of this"
            )
