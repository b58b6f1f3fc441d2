"""Where activations pass between plain tensors and DTensors, and what is summed on the way.

[Note: what a tensor is] in `__init__.py` is kept here. torch's `from_local` and `to_local` do the same for any mesh;
these know that the mesh has one dimension and that shards are equal, which makes them several times as fast.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

REPLICATE, PARTIAL = Replicate(), Partial()


def shard_dim(placement: Placement) -> int | None:
    """The dimension that a placement divides, if it divides one."""
    return placement.dim if type(placement) in (Shard, _StridedShard) else None  # type: ignore[attr-defined]


def spec_of(local: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensorSpec:
    """What the equal shards of all ranks are together, from one of them."""
    shape, stride = list(local.shape), list(local.stride())
    dim = shard_dim(placement)
    if dim is not None:
        shape[dim] *= mesh.size()
        stride = [
            step * mesh.size() if other != dim and step >= stride[dim] else step for other, step in enumerate(stride)
        ]
    return DTensorSpec(mesh, (placement,), tensor_meta=TensorMeta(torch.Size(shape), tuple(stride), local.dtype))


def wrap(local: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """The DTensor of which this is the rank's part."""
    wrapped: DTensor = _Wrap.apply(local, spec_of(local, mesh, placement))  # type: ignore[no-untyped-call]
    return wrapped


def unwrap(tensor: DTensor, gradient: Placement | None = None) -> Tensor:
    """This rank's part. `gradient` says what ranks' gradients are together, if it is not what the tensor is."""
    local: Tensor = _Unwrap.apply(tensor, gradient)  # type: ignore[no-untyped-call]
    return local


def plain(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class _Wrap(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: DTensorSpec) -> DTensor:
        ctx.spec = spec
        return DTensor(local.view_as(local), spec, requires_grad=local.requires_grad)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: DTensor) -> tuple[Tensor, None]:
        wanted = ctx.spec.placements if not ctx.spec.placements[0].is_partial() else (REPLICATE,)
        if gradient.placements != wanted:
            gradient = gradient.redistribute(placements=wanted)
        return gradient._local_tensor, None


class _Unwrap(Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, gradient: Placement | None) -> Tensor:
        local = tensor._local_tensor
        ctx.spec, ctx.placement = tensor._spec, gradient or tensor._spec.placements[0]
        ctx.alike = (local.stride(), local.dtype) if gradient is None else None
        return local.view_as(local)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[DTensor, None]:
        # Most gradients lie as their tensors do. Each has a spec of its own, as in torch; copying one is cheaper.
        alike = ctx.alike == (gradient.stride(), gradient.dtype)
        spec = copy.copy(ctx.spec) if alike else spec_of(gradient, ctx.spec.mesh, ctx.placement)
        return DTensor(gradient, spec, requires_grad=False), None


class SumForward(Function):
    """The sum over ranks of what each has computed of a whole; what comes back is the whole's gradient already."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Sum, in place."""
        ctx.mark_dirty(partial)
        dist.all_reduce(partial, group=group)
        return partial

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Pass on."""
        return gradient, None


class SumBackward(Function):
    """What all ranks have goes into the part of each; the gradients that come back are parts of a sum."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Pass on."""
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Sum, in a copy: the gradient may be someone else's too."""
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
