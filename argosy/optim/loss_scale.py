"""Dynamic loss scaling: small gradients survive fp16.

fp16 knows no number between 0 and 6e-8. So the loss is multiplied before backward, and gradients are divided after
it. If one is not finite then, the step is skipped and the scale halved; after many clean steps it is doubled: it stays
as high as the gradients allow. (Micikevicius et al., "Mixed Precision Training", 2018.)

Nothing here knows of other workers. Gradients are reduced before they are divided, so all workers hold the same bits
and decide alike; what is not finite on one of them is not finite in the sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

START: Final = 2.0**16
CLEAN_STEPS: Final = 2000
LEAST: Final = 2.0**-16


class LossScaler:
    """The scale of the loss, and when it changes.

    >>> scaler = LossScaler()
    >>> gradient = scaler.scale(torch.tensor(0.5))
    >>> scaler.unscale_([gradient]), gradient
    (True, tensor(0.5000))
    >>> scaler.update(finite=False)
    >>> scaler.factor
    32768.0
    """

    def __init__(self, start: float = START, clean_steps: int = CLEAN_STEPS) -> None:
        self.factor, self.clean = start, 0  # clean: steps since the factor changed or one was skipped
        self._clean_steps = clean_steps

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss * self.factor

    @torch.no_grad()
    def unscale_(self, gradients: Iterable[Tensor]) -> bool:
        """Divide gradients by the scale; whether all numbers in them are finite."""
        kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in gradients:
            dense = gradient._values() if gradient.is_sparse else gradient
            kinds.setdefault((dense.device, dense.dtype), []).append(dense)
        finite = True
        for (device, _), tensors in kinds.items():
            found = torch.zeros(1, device=device)
            inverse = torch.full((1,), 1 / self.factor, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, inverse)
            finite = finite and not found.item()
        return finite

    def update(self, finite: bool) -> None:
        """A step was taken, or skipped because a gradient was not finite."""
        if finite:
            self.clean += 1
            if self.clean >= self._clean_steps:
                self.factor, self.clean = self.factor * 2, 0
            return
        self.factor, self.clean = self.factor / 2, 0
        if self.factor < LEAST:
            raise FloatingPointError(
                f"gradients are not finite at any scale of the loss (it is down to {self.factor:.3g}): the loss itself "
                f"is infinite or NaN; look at the data and the learning rate, or train with precision=bf16"
            )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"factor": self.factor, "clean": self.clean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with an earlier run's scale."""
        self.factor, self.clean = float(state["factor"]), int(state["clean"])
