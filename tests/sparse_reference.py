"""The sparse codecs in plain torch: what the native ones are tested against."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Rule:
    scale: float = 1.0
    decay: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False


def update(share: Tensor, velocity: Tensor | None, kept: Tensor, parameter: Tensor | None, rule: Rule) -> None:
    """Add a share to what is kept, in place."""
    gradient = share * rule.scale
    if parameter is not None:
        gradient = gradient + parameter * rule.decay
    if velocity is None:
        kept += gradient
    elif rule.nesterov:
        velocity.copy_((velocity + gradient) * rule.momentum)
        kept.copy_(kept + velocity + gradient)
    else:
        velocity.copy_(velocity * rule.momentum + gradient)
        kept += velocity


def take(velocity: Tensor | None, kept: Tensor, k: int) -> dict[int, float]:
    """Take the k largest out of what is kept, in place: of equals the first, and zeros never."""
    broken = (~kept.isfinite()).nonzero().flatten().tolist()
    if broken:
        chosen = broken
        sent = {broken[0]: float("nan")}
    else:
        order = kept.abs().sort(descending=True, stable=True).indices[:k]
        chosen = order[kept[order] != 0].sort().values.tolist()
        sent = dict(zip(chosen, kept[chosen].tolist(), strict=True))
    kept[chosen] = 0
    if velocity is not None:
        velocity[chosen] = 0
    return sent
