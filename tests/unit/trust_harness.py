"""LARS and LAMB straight from the papers, one tensor at a time, in double precision: what the fast ones must match."""

from typing import Any

import torch
from torch import Tensor


class PlainLARS:
    """You et al. 2017, algorithm 1, with the usual exceptions: see `excluded`."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.groups = groups
        self.velocity: dict[int, Tensor] = {}

    def step(self, weights: list[list[Tensor]], gradients: list[list[Tensor | None]]) -> None:
        for group, group_weights, group_gradients in zip(self.groups, weights, gradients, strict=True):
            for w, g in zip(group_weights, group_gradients, strict=True):
                if g is None:
                    continue
                decay, rate = group["weight_decay"], 1.0
                if excluded(group, w):
                    decay = 0.0
                else:
                    below = g.norm() + decay * w.norm()
                    if w.norm() > 0 and below > 0:
                        rate = float(group["trust_coefficient"] * w.norm() / (below + group["eps"]))
                update = group["lr"] * rate * (g + decay * w)
                v = group["momentum"] * self.velocity.get(id(w), torch.zeros_like(w)) + update
                self.velocity[id(w)] = v
                w -= update + group["momentum"] * v if group["nesterov"] else v


class PlainLAMB:
    """You et al. 2019, algorithm 2."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self.groups = groups
        self.moments: dict[int, tuple[Tensor, Tensor, int]] = {}

    def step(self, weights: list[list[Tensor]], gradients: list[list[Tensor | None]]) -> None:
        for group, group_weights, group_gradients in zip(self.groups, weights, gradients, strict=True):
            beta1, beta2 = group["betas"]
            for w, g in zip(group_weights, group_gradients, strict=True):
                if g is None:
                    continue
                m, v, t = self.moments.get(id(w), (torch.zeros_like(w), torch.zeros_like(w), 0))
                m, v, t = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g, t + 1
                self.moments[id(w)] = m, v, t
                if group["bias_correction"]:
                    m, v = m / (1 - beta1**t), v / (1 - beta2**t)
                r = m / (v.sqrt() + group["eps"])
                trust = 1.0
                if not excluded(group, w):
                    r = r + group["weight_decay"] * w
                    if w.norm() > 0 and r.norm() > 0:
                        trust = float(w.norm() / r.norm())
                    trust = min(trust, group["trust_max"] or trust)
                w -= group["lr"] * trust * r


def excluded(group: dict[str, Any], w: Tensor) -> bool:
    return bool(group["exclude_1d"]) and w.dim() <= 1


SHAPES = [[(5, 4), (4,), (3, 2, 2)], [(6, 2), (), (1, 1)]]


class Trial:
    """The same parameters and gradients for an optimizer of ours and for a plain one."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.ours = [
            [torch.nn.Parameter(torch.randn(shape, generator=self.random).to(dtype)) for shape in shapes]
            for shapes in SHAPES
        ]
        self.ours[0][2].data.zero_()  # a layer that begins at zero
        self.plain = [[w.detach().double().clone() for w in group] for group in self.ours]

    def gradients(self, step: int) -> list[list[Tensor | None]]:
        """New gradients, for both; some are missing and some are zero."""
        drawn: list[list[Tensor | None]] = []
        for group in self.ours:
            for place, w in enumerate(group):
                gradient = torch.randn(w.shape, generator=self.random).to(w.dtype)
                w.grad = None if (step + place) % 5 == 3 else gradient * (0 if (step + place) % 7 == 2 else 1)
            drawn.append([None if w.grad is None else w.grad.double() for w in group])
        return drawn

    def check(self, rtol: float = 1e-5, atol: float = 1e-6) -> None:
        for ours, plain in zip(self.ours, self.plain, strict=True):
            for a, b in zip(ours, plain, strict=True):
                torch.testing.assert_close(a.detach().double(), b, rtol=rtol, atol=atol)
