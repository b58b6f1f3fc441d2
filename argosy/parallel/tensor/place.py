"""Parameters become DTensors on the tensor axis: each rank keeps its part, of what the axis's first rank has.

[Note: fused parameters] A rank has some heads, so of a fused q, k and v it has some rows of each third. DTensor calls
this `_StridedShard`, so that the parameter is still described as what it is, for optimizers and checkpoints.
`fully_shard` divides parameters further, along their first dimension by default, and what it then says of a strided one
is not true: `fsdp_placement` tells it to take the second. A bias has no second one, so a fused bias stays whole.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from argosy.parallel.tensor.crossing import shard_dim
from argosy.parallel.tensor.plan import Plan


def place(plan: Plan, mesh: DeviceMesh) -> None:
    """Make a model's parameters DTensors, where its plan says; those that were one stay one."""
    group = mesh.get_group()
    first = dist.get_global_rank(group, 0)
    made: dict[int, nn.Parameter] = {}
    with torch.no_grad():
        for name, style in plan.styles.items():
            module = plan.model.get_submodule(name)
            recurse = isinstance(module, nn.MultiheadAttention)
            for path, parameter in list(module.named_parameters(recurse=recurse, remove_duplicate=False)):
                if id(parameter) not in made:
                    if not parameter.is_meta:
                        dist.broadcast(parameter.data, first, group=group)
                    made[id(parameter)] = _placed(parameter, mesh, style.placement(path))
                owner, _, leaf = path.rpartition(".")
                module.get_submodule(owner)._parameters[leaf] = made[id(parameter)]
        for buffer in plan.model.buffers():
            if buffer.numel() and not buffer.is_meta:
                dist.broadcast(buffer, first, group=group)


def fsdp_placement(parameter: nn.Parameter) -> Shard | None:
    """For `fully_shard(..., shard_placement_fn=)` on another axis: along what it may divide a parameter further."""
    strided = isinstance(parameter, DTensor) and isinstance(parameter.placements[0], _StridedShard)
    return Shard(1) if strided else None


def _placed(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    whole = parameter.detach().contiguous()
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    part = _part(whole, placement, mesh.get_local_rank(), mesh.size())
    tensor = DTensor(part, DTensorSpec(mesh, (placement,), tensor_meta=meta), requires_grad=False)
    placed = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    if placed.requires_grad:
        placed.register_hook(lambda gradient: _laid_out(gradient, placement))
    return placed


def _laid_out(gradient: Tensor, placement: Placement) -> Tensor:
    """A gradient, laid out as its parameter is: where a model's own code uses the parameter, it may be a sum to be."""
    if not isinstance(gradient, DTensor) or gradient.placements == (placement,):
        return gradient
    return gradient.redistribute(placements=(placement,))


def _part(whole: Tensor, placement: Placement, rank: int, size: int) -> Tensor:
    """A rank's part, in memory of its own: the whole is given back."""
    dim = shard_dim(placement)
    if dim is None:
        return whole.clone()
    parts = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
    return torch.cat([each.chunk(size, dim)[rank] for each in whole.chunk(parts, dim)], dim)
