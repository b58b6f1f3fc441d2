"""What LARS and LAMB share: which parameters they adapt, and norms of many tensors at once.

Both multiply the update of each tensor ("layer") by a trust ratio of two norms, |parameter| / |update|. On a CPU the
norms of a model are cheap; on a GPU reading one back for each tensor would stall it. So norms stay tensors: one
foreach call, one stack, and all ratios are computed in a few operations.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

_CACHED: Final = 1 << 17  # of four lists, parameters to steps: about what a core's own cache holds


@dataclass(frozen=True)
class Batch:
    """Parameters of one group that are stepped together: of one device and type, all adapted or none."""

    adapted: bool
    parameters: list[Tensor]
    gradients: list[Tensor]


class LayerWise(Optimizer):
    """An optimizer that steps whole batches of parameters."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; parameters without a gradient stay as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for batch in batches(group, type(self).__name__):
                self._step(group, batch)
        return loss

    @abstractmethod
    def _step(self, group: dict[str, Any], batch: Batch) -> None: ...


def batches(group: dict[str, Any], optimizer: str) -> Iterator[Batch]:
    """The parameters of a group that have a gradient, in batches that foreach operations can take.

    With the group's `exclude_1d`, biases and the scales of norms (anything of at most one dimension) are not adapted:
    they are few, their norms say little about a layer, and decaying them helps nobody.
    """
    found: dict[tuple[bool, torch.device, torch.dtype], Batch] = {}
    for parameter in group["params"]:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout != torch.strided:
            raise RuntimeError(
                f"{optimizer} needs the norm of whole gradients, and that of a parameter of shape "
                f"{tuple(parameter.shape)} is sparse; use sparse=False in its layer, or an optimizer of its own"
            )
        adapted = parameter.dim() > 1 or not group["exclude_1d"]
        batch = found.setdefault((adapted, parameter.device, parameter.dtype), Batch(adapted, [], []))
        batch.parameters.append(parameter)
        batch.gradients.append(gradient)
    for (_, device, _), batch in found.items():
        yield from _cache_sized(batch) if device.type == "cpu" else [batch]


def _cache_sized(batch: Batch) -> Iterator[Batch]:
    """The batch in parts of about `_CACHED` numbers: a CPU calls operations cheaply, and waits for memory."""
    begin = size = 0
    for place, parameter in enumerate(batch.parameters):
        size += parameter.numel()
        if size >= _CACHED or place == len(batch.parameters) - 1:
            part = slice(begin, place + 1)
            yield Batch(batch.adapted, batch.parameters[part], batch.gradients[part])
            begin, size = place + 1, 0


def norms(tensors: list[Tensor]) -> Tensor:
    """The 2-norm of each tensor, in fp32 or better."""
    kind = torch.float32 if tensors[0].dtype in (torch.float16, torch.bfloat16) else None
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=kind))


def ratio(above: Tensor, below: Tensor, eps: float = 0.0) -> Tensor:
    """`above / (below + eps)`; where either is zero there is nothing to compare, and the ratio is 1."""
    return torch.where((above > 0) & (below > 0), above / (below + eps), torch.ones_like(above))


def state_of(optimizer: Optimizer, parameters: list[Tensor], *names: str) -> list[list[Tensor]]:
    """By name, what the optimizer keeps for each parameter; zeros where it has kept nothing yet."""
    kept: dict[str, list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        state = optimizer.state[parameter]
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            kept[name].append(state[name])
    return [kept[name] for name in names]


def refuse_unless(holds: bool, name: str, value: object, need: str) -> None:
    """Refuse an option that an optimizer cannot use."""
    if not holds:
        raise ValueError(f"{name}={value}: {need}")
