"""The output of a fused layer: several parts (q, k and v; a gate and what it opens), each of which is divided.

DTensor's rules for such tensors (`_StridedShard`) gather them where they could be taken apart in place, and some are
wrong: in torch 2.13 a view that begins with the heads, and a cumulative sum, give the wrong numbers. So only what is
known to be right is done with them as they are; for all else they are gathered first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from argosy.parallel.tensor.changes import changed
from argosy.parallel.tensor.crossing import unwrap, wrap

_ASKING = frozenset(
    {"__get__", "__set__", "__delete__", "size", "dim", "numel", "is_floating_point", "__len__", "ndimension"}
    | {"register_hook", "register_post_accumulate_grad_hook", "retain_grad"}  # `fully_shard` has one on outputs
    | {"__deepcopy__", "__reduce_ex__"}
)
_KEEPING = _ASKING | {"detach", "grad", "backward"}
_ALIKE = frozenset(
    {"contiguous", "clamp", "float", "bfloat16", "half", "to", "clone", "detach"}
    | {"requires_grad_", "detach_", "copy_", "zero_", "fill_", "clamp_", "add_", "sub_", "mul_", "div_"}
)


def is_fused(tensor: object) -> bool:
    """Whether it has several parts, each of them divided."""
    return isinstance(tensor, DTensor) and type(tensor._spec.placements[0]) is _StridedShard


def keeps(func: Any) -> bool:
    """Whether a function is about the very tensor that it is given, or makes another of its kind: no other will do."""
    return getattr(func, "__name__", "") in _KEEPING


def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What a function of torch gives for a fused tensor, if it can be told without gathering; else NotImplemented."""
    name = getattr(func, "__name__", "")
    if not args or not is_fused(args[0]):
        return NotImplemented
    tensor: DTensor = args[0]
    if name in _ASKING or name in _ALIKE:
        return func(*args, **kwargs)
    if changed(func, args, kwargs) is not None:  # gathering would change a copy
        raise RuntimeError(
            f"{name} changes the output of a fused layer in place, which is not known to be right while it is divided; "
            f"write it so that it gives a new tensor, or say tensor_plan=...:replicate for the layer"
        )
    if name == "split":
        return _split(tensor, *args[1:], **kwargs)
    if name == "chunk":
        return _chunk(tensor, *args[1:], **kwargs)
    if name in ("view", "reshape", "unflatten"):
        return _view(func, tensor, args[1:], kwargs)
    return NotImplemented


def _split(tensor: DTensor, split_size: int | Sequence[int], dim: int = 0) -> Any:
    parts, equal = _parts(tensor), tensor.shape[dim] // _parts(tensor)
    sizes = [split_size] * parts if isinstance(split_size, int) else list(split_size)
    return _apart(tensor, dim) if sizes == [equal] * parts else NotImplemented


def _chunk(tensor: DTensor, chunks: int, dim: int = 0) -> Any:
    return _apart(tensor, dim) if chunks == _parts(tensor) else NotImplemented


def _apart(tensor: DTensor, dim: int) -> Any:
    dim %= tensor.dim()
    if dim != _dim(tensor):
        return NotImplemented
    parts = unwrap(tensor).chunk(_parts(tensor), dim)
    return tuple(wrap(part, tensor.device_mesh, Shard(dim)) for part in parts)


def _view(func: Any, tensor: DTensor, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A view that gives the parts a dimension of their own, or leaves theirs as it is, is one of each rank's."""
    # Which of them it is shows in the shape that it has.
    shape = func(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), *args, **kwargs).shape
    before, length = tensor.shape[: _dim(tensor)].numel(), tensor.shape[_dim(tensor)]
    for dim, size in enumerate(shape):
        if shape[:dim].numel() == before and size in (length, _parts(tensor)):
            return func(tensor, *args, **kwargs)
    return NotImplemented


def _parts(tensor: DTensor) -> int:
    placement = tensor.placements[0]
    assert isinstance(placement, _StridedShard)
    return int(placement.split_factor)


def _dim(tensor: DTensor) -> int:
    placement = tensor.placements[0]
    assert isinstance(placement, _StridedShard)
    return int(placement.dim)
