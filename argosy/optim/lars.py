"""LARS: SGD with momentum, in which each layer's step is in proportion to its weights.

You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks" (2017). With a large batch the learning rate has
to be large, and the layer whose gradients are large beside its weights diverges first. So layer l steps by a local
rate, lambda = trust * |w| / (|g| + decay * |w|), times the global one:

    v = momentum * v + lr * lambda * (g + decay * w)
    w = w - v

As in the paper the learning rate is inside the momentum: what has been gathered keeps the rate of its time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from argosy.optim.trust import Batch, LayerWise, norms, ratio, refuse_unless, state_of


class LARS(LayerWise):
    """Layer-wise adaptive rate scaling: SGD for large batches of images.

    `trust_coefficient` is the paper's eta: how far a layer may go, in parts of its own norm, at a learning rate of 1.
    `exclude_1d`: biases and the scales of norms are neither adapted nor decayed; they step as SGD would.
    All options may differ between parameter groups.

    >>> net = torch.nn.Linear(4, 1)
    >>> optimizer = LARS(net.parameters(), lr=1.0, weight_decay=1e-4)
    >>> net(torch.ones(2, 4)).sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        trust_coefficient: float = 0.001,
        eps: float = 1e-8,
        nesterov: bool = False,
        exclude_1d: bool = True,
    ) -> None:
        refuse_unless(bool(lr >= 0), "lr", lr, "a learning rate is 0 or more")
        refuse_unless(0 <= momentum < 1, "momentum", momentum, "expected 0 or more, and below 1")
        refuse_unless(weight_decay >= 0, "weight_decay", weight_decay, "expected 0 or more")
        refuse_unless(trust_coefficient > 0, "trust_coefficient", trust_coefficient, "expected more than 0")
        refuse_unless(eps >= 0, "eps", eps, "expected 0 or more")
        refuse_unless(momentum > 0 or not nesterov, "nesterov", nesterov, "it needs momentum above 0")
        options = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "exclude_1d": exclude_1d,
        }
        super().__init__(params, options)

    def _step(self, group: dict[str, Any], batch: Batch) -> None:
        decay, momentum = group["weight_decay"], group["momentum"]
        steps: Any = batch.gradients
        rates: Any = group["lr"]
        if batch.adapted:
            weights = norms(batch.parameters)
            below = norms(batch.gradients) + decay * weights
            rates = (rates * ratio(group["trust_coefficient"] * weights, below, group["eps"])).to(steps[0].dtype)
            rates = rates.unbind()
            if decay:
                steps = torch._foreach_add(steps, batch.parameters, alpha=decay)
        steps = torch._foreach_mul(steps, rates)
        if momentum:
            (gathered,) = state_of(self, batch.parameters, "momentum_buffer")
            torch._foreach_mul_(gathered, momentum)
            torch._foreach_add_(gathered, steps)
            if group["nesterov"]:
                torch._foreach_add_(steps, gathered, alpha=momentum)
            else:
                steps = gathered
        torch._foreach_sub_(batch.parameters, steps)
