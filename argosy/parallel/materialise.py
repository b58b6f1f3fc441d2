"""Models on the meta device: they have shapes and no numbers until each worker knows which part is its own.

So a model that no worker could hold can be written down and divided. Its numbers are made module by module, in the
order of `model.modules()`, by each module's own `reset_parameters()`, whole, and each worker keeps its part: one module
is in memory at a time, with the numbers that one process would make in this order from the same seed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from argosy.comm.group import Group


def is_meta(model: nn.Module) -> bool:
    """Whether a model has parameters without numbers."""
    return any(parameter.is_meta for parameter in model.parameters())


@torch.no_grad()
def materialise(model: nn.Module, device: str, group: Group) -> None:
    """Make the numbers of a model whose parameters are on the meta device, divided or whole."""
    _refuse_unmakeable(model)
    seed = torch.tensor([torch.initial_seed() & ((1 << 62) - 1)])
    group.broadcast(seed)  # workers must draw the same numbers, of which each keeps others
    model.to_empty(device=device)
    made: set[int] = set()
    with torch.random.fork_rng():
        torch.manual_seed(int(seed))
        for module in model.modules():
            own = dict(module.named_parameters(recurse=False))
            if not own and not list(module.buffers(recurse=False)):
                continue
            _make(module, own, made, device)


def _make(module: nn.Module, own: dict[str, nn.Parameter], made: set[int], device: str) -> None:
    for name, parameter in own.items():
        module._parameters[name] = nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device=device), parameter.requires_grad
        )
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if reset is not None:
        reset()
    for name, parameter in own.items():
        fresh: Tensor = module._parameters[name].detach()  # type: ignore[union-attr]
        if id(parameter) not in made:  # tied weights are made once, by the first module that has them
            made.add(id(parameter))
            if isinstance(parameter, DTensor):
                fresh = distribute_tensor(fresh, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(fresh)
        module._parameters[name] = parameter


def _refuse_unmakeable(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta:
            raise ValueError(
                f"{name} is on {tensor.device} and other parameters are on the meta device: build the whole model "
                f"under `with torch.device('meta')`, or none of it"
            )
    for name, module in model.named_modules():
        holds = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if holds and not any(
            callable(getattr(module, reset, None)) for reset in ("reset_parameters", "_reset_parameters")
        ):
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) is on the meta device and has {holds[0][0]}, which "
                f"nothing can make: give the class a reset_parameters() that sets it, or build the model off meta"
            )
