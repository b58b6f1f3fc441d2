"""Tensors as the native engine sees them: an address, a number of elements, and the number of their type."""

from __future__ import annotations

import torch
from torch import Tensor

from argosy.comm.group import Op

# In the order of the native enums.
OPS = {name: number for number, name in enumerate(("sum", "avg", "min", "max", "prod", "band", "bor", "bxor"))}
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int32, torch.int64, torch.int8, torch.uint8, torch.int16)
_MOVED = (torch.bool, torch.complex64, torch.complex128)
_NUMBERS = {dtype: number for number, dtype in enumerate((*_FLOATS, *_INTEGERS, *_MOVED))}
_RAW = {1: 12, 2: 13, 4: 14, 8: 15}  # other types are moved, and not reduced: by the bytes of an element
REDUCIBLE = frozenset((*_FLOATS, *_INTEGERS))
_BITWISE = ("band", "bor", "bxor")
# The native number of a type, for each op that it can be reduced by.
_REDUCED = {
    op: {dtype: _NUMBERS[dtype] for dtype in REDUCIBLE if dtype in _INTEGERS or op not in _BITWISE} for op in OPS
}


def movable(tensor: Tensor) -> int:
    """The native number of a tensor's type; raises for a tensor that the engine cannot read."""
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            "the tensor is a view that conjugates or negates lazily; use .resolve_conj() or .resolve_neg()"
        )
    if not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"the engine takes contiguous tensors on the CPU, not one on {tensor.device} with strides "
            f"{tuple(tensor.stride())}; use .contiguous() or .cpu()"
        )
    number = _NUMBERS.get(tensor.dtype)
    if number is None:
        number = _RAW.get(tensor.dtype.itemsize)
        if number is None:
            raise ValueError(f"the engine does not know {tensor.dtype}; view it as another type")
    return number


def as_it_is(tensor: Tensor, op: Op) -> int | None:
    """The native number of a tensor's type, or None if the engine cannot reduce the tensor by `op` where it lies."""
    number = _REDUCED[op].get(tensor.dtype)
    if number is None or tensor.layout is not torch.strided or tensor.is_neg():
        return None
    return number if tensor.is_contiguous() and tensor.is_cpu else None


def reducible(tensor: Tensor, op: Op) -> int:
    """The same; raises for a tensor that the engine cannot reduce."""
    if op not in OPS:
        raise ValueError(f"op={op!r}: choose one of {', '.join(OPS)}")
    number = as_it_is(tensor, op)
    if number is not None:
        return number
    movable(tensor)
    if tensor.dtype not in REDUCIBLE:
        raise ValueError(f"{tensor.dtype} cannot be reduced; convert it to another type (bool to uint8, say)")
    raise ValueError(f"{op} works on whole numbers, and the tensor is {tensor.dtype}")


def check_sizes(name: str, larger: Tensor, smaller: Tensor, ranks: int) -> None:
    """Raise unless the larger tensor has a part of the smaller one's size for each rank."""
    movable(larger)
    if larger.dtype != smaller.dtype or larger.numel() != ranks * smaller.numel():
        raise ValueError(
            f"{name} has {larger.numel()} elements of {larger.dtype}; with {ranks} ranks and a part of "
            f"{smaller.numel()} of {smaller.dtype} it must have {ranks * smaller.numel()} of that type"
        )
