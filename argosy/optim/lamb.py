"""LAMB: Adam, in which each layer's step is in proportion to its weights.

You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (2019). What LARS is to SGD, for
models that are trained with Adam. With Adam's moments m and v, corrected for having begun at zero,

    r = m / (sqrt(v) + eps) + decay * w
    w = w - lr * |w| / |r| * r
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from argosy.optim.trust import Batch, LayerWise, norms, ratio, refuse_unless, state_of


class LAMB(LayerWise):
    """Layer-wise adaptive moments: AdamW for large batches of text.

    `trust_max`: the ratio |w| / |r| never exceeds it; None leaves it as it is.
    `bias_correction=False` takes the moments as they are, which makes the first steps short: a warm-up of a kind.
    `exclude_1d`: biases and the scales of norms are neither adapted nor decayed; they step as Adam would.
    All options may differ between parameter groups.

    >>> net = torch.nn.Linear(4, 1)
    >>> optimizer = LAMB(net.parameters(), lr=0.002)
    >>> net(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        trust_max: float | None = None,
        exclude_1d: bool = True,
    ) -> None:
        refuse_unless(bool(lr >= 0), "lr", lr, "a learning rate is 0 or more")
        refuse_unless(all(0 <= beta < 1 for beta in betas), "betas", betas, "expected each 0 or more, and below 1")
        refuse_unless(eps >= 0, "eps", eps, "expected 0 or more")
        refuse_unless(weight_decay >= 0, "weight_decay", weight_decay, "expected 0 or more")
        refuse_unless(trust_max is None or trust_max > 0, "trust_max", trust_max, "expected more than 0, or None")
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "trust_max": trust_max,
            "exclude_1d": exclude_1d,
        }
        super().__init__(params, options)

    def _step(self, group: dict[str, Any], batch: Batch) -> None:
        steps = self._adam(group, batch)
        rates: Any = group["lr"]
        if batch.adapted:
            if group["weight_decay"]:
                torch._foreach_add_(steps, batch.parameters, alpha=group["weight_decay"])
            trust = ratio(norms(batch.parameters), norms(steps))
            if group["trust_max"] is not None:
                trust.clamp_(max=group["trust_max"])
            rates = (rates * trust).to(steps[0].dtype).unbind()
        torch._foreach_mul_(steps, rates)
        torch._foreach_sub_(batch.parameters, steps)

    def _adam(self, group: dict[str, Any], batch: Batch) -> list[Tensor]:
        """Adam's step, before decay and learning rate."""
        beta1, beta2 = group["betas"]
        means, squares = state_of(self, batch.parameters, "exp_avg", "exp_avg_sq")
        torch._foreach_lerp_(means, batch.gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, batch.gradients, batch.gradients, 1 - beta2)
        roots = torch._foreach_sqrt(squares)
        # A plain number, unlike torch's Adam: no tensor has to be read back for the correction.
        taken = [self._count(parameter) for parameter in batch.parameters]
        if group["bias_correction"]:
            torch._foreach_div_(roots, [(1 - beta2**step) ** 0.5 for step in taken])
        torch._foreach_add_(roots, group["eps"])
        steps = torch._foreach_div(means, roots)
        if group["bias_correction"]:
            torch._foreach_div_(steps, [1 - beta1**step for step in taken])
        return list(steps)

    def _count(self, parameter: Tensor) -> int:
        """How many steps a parameter has taken, this one included."""
        state = self.state[parameter]
        state["step"] = int(state.get("step", 0)) + 1
        return int(state["step"])
