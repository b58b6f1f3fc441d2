"""Which stage holds what of a model, and letting go of the rest.

A parameter is held by every stage that uses it. One that several stages use (an embedding that is the output head too)
is *tied*: it lives on each of them, and its gradients are added up between them (`ties.py`).

A parameter that this worker does not hold is taken out of its module, and a tensor without numbers takes its place, as
a plain attribute: `named_parameters()` tells what is here, under the names that it has in the whole model.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from argosy.parallel.pipeline.ghost import Ghost
from argosy.parallel.pipeline.trace import Trace


@dataclass(frozen=True)
class Parts:
    """The cuts (the layers that begin the stages, but the first), and the stages that hold each tensor by its name."""

    cuts: tuple[str, ...]
    stages_of: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, seen: Trace, cuts: Sequence[str]) -> Parts:
        """Who uses what, if the model is cut there. What nobody uses stays with the first stage."""
        begins = [seen.at(name).time for name in cuts]
        held = {
            name: tuple(sorted({bisect.bisect_right(begins, at) for at in times})) or (0,)
            for name, times in seen.uses.items()
        }
        return cls(tuple(cuts), held)

    def bounds(self, stage: int) -> tuple[str | None, str | None]:
        """The layers that begin this stage and the next one."""
        names = (None, *self.cuts, None)
        return names[stage], names[stage + 1]

    def held_by(self, stages: Sequence[int]) -> set[str]:
        """The names of what these stages hold."""
        return {name for name, holders in self.stages_of.items() if set(holders) & set(stages)}

    def ties(self, place: Callable[[int], tuple[int, ...]], names: Sequence[str]) -> dict[tuple[int, ...], list[str]]:
        """Which tensors several workers hold, by these workers; `place` says who runs a stage."""
        shared: dict[tuple[int, ...], list[str]] = {}
        for name in names:
            workers = tuple(sorted({worker for stage in self.stages_of[name] for worker in place(stage)}))
            if len(workers) > 1:
                shared.setdefault(workers, []).append(name)
        return shared


@dataclass(frozen=True)
class Held:
    """What became of a model: parameters that were without numbers and stand elsewhere now, and who still has none."""

    moved: Mapping[nn.Parameter, nn.Parameter]
    unset: Sequence[str]


def hold(
    model: nn.Module, ghost: Ghost, names: set[str], broadcast: Callable[[Tensor], object], has_numbers: bool
) -> Held:
    """Make this worker hold these tensors only, with the first worker's numbers; all workers call it.

    Parameters on the meta device get memory if they are held. If the first worker has no numbers either
    (`has_numbers`), whoever loads or initialises the model gives them some.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for kept in (module._parameters, module._buffers):
            for key, tensor in kept.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((module, key))
    moved, unset = {}, []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        here = tensor
        if tensor.device.type == "meta" and (has_numbers or name in names):
            here = torch.empty_like(tensor, device="cpu")
            if isinstance(tensor, nn.Parameter):
                here = nn.Parameter(here, requires_grad=tensor.requires_grad)
                moved[tensor] = here
            if not has_numbers:
                unset.append(name)
        if has_numbers:
            _fill(here.data, broadcast)
        for module, key in places[id(tensor)]:
            if key in module._buffers:
                module._buffers[key] = here
            elif name in names:
                module._parameters[key] = cast(nn.Parameter, here)
            else:
                del module._parameters[key]
                module.__dict__[key] = ghost.named[name]
    for module in model.modules():
        if isinstance(module, nn.RNNBase):  # it keeps its weights in a list, too
            module._flat_weights = [getattr(module, key, None) for key in module._flat_weights_names]
    return Held(moved, unset)


def prune(optimizer: Optimizer, kept: Sequence[nn.Parameter], moved: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Take out of an optimizer what is not among these parameters, with its state."""
    ids = {id(parameter) for parameter in kept}
    for group in optimizer.param_groups:
        group["params"] = [here for each in group["params"] if id(here := moved.get(each, each)) in ids]
    for parameter in [each for each in optimizer.state if id(each) not in ids]:
        del optimizer.state[parameter]


def _fill(tensor: Tensor, broadcast: Callable[[Tensor], object]) -> None:
    plain = tensor.contiguous()
    broadcast(plain)
    if plain is not tensor:
        tensor.copy_(plain)
