"""Between the tensors that torch hands over and those that the engine takes.

The engine takes contiguous tensors in memory of the CPU, and reduces numbers. torch hands over views with gaps, lists
of tensors, booleans and complex numbers. Here the ones become the others; what cannot be is refused with the operation
and the way out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from argosy.comm.elements import REDUCIBLE
from argosy.comm.group import Op

# By the number of torch's enumerator: looking one up by itself takes half a microsecond. After them comes PREMUL_SUM.
OPS: Final[tuple[Op, ...]] = ("sum", "avg", "prod", "min", "max", "band", "bor", "bxor")

# Booleans are bytes that hold 0 or 1, and stay so: a sum is true where any of them is.
_BOOLEAN_OPS: Final[dict[Op, Op]] = {
    "sum": "max",
    "max": "max",
    "bor": "max",
    "min": "min",
    "prod": "min",
    "band": "min",
    "bxor": "bxor",
}

Finish = Callable[[], None]


class Reducible(NamedTuple):
    """A tensor made ready to be reduced."""

    dense: Tensor  # contiguous, with the tensor's own type and shape; the tensor itself if possible
    buffer: Tensor  # the same memory, of a type that the engine reduces
    op: Op


def only(operation: str, tensors: Sequence[Tensor]) -> Tensor:
    """The one tensor of a list: torch's lists are for several GPUs in one process, which nobody has any more."""
    if len(tensors) != 1:
        raise ValueError(f"{operation} takes a list of one tensor, got {len(tensors)}: call it once for each")
    return tensors[0]


def dense(operation: str, tensor: Tensor) -> Tensor:
    """The tensor itself, or a contiguous copy."""
    if tensor.layout is not torch.strided:
        raise NotImplementedError(
            f"{operation} of a {tensor.layout} tensor is not supported by the argosy backend: "
            f"use tensor.to_dense(), an embedding with sparse=False, or a Gloo group"
        )
    return tensor if tensor.is_contiguous() else tensor.detach().contiguous()


def room(operation: str, tensor: Tensor) -> Tensor:
    """A contiguous place for a result that belongs into `tensor`: the tensor itself, or a new one."""
    dense_layout = tensor.layout is torch.strided and tensor.is_contiguous()
    return tensor if dense_layout else torch.empty_like(dense(operation, tensor))


def put_back(tensor: Tensor, result: Tensor) -> Finish | None:
    """What is left to do once `result` is there, which may be the tensor itself."""
    return None if result is tensor else partial(_copy, tensor, result)


def put_back_parts(tensors: Sequence[Tensor], flat: Tensor) -> Finish:
    """The same for a list of tensors that were received one behind the other."""
    return partial(_copy_parts, tensors, flat)


def put_back_lists(lists: Sequence[Sequence[Tensor]], flats: Sequence[Tensor]) -> Finish | None:
    """The same for several such lists."""
    return in_turn([put_back_parts(tensors, flat) for tensors, flat in zip(lists, flats, strict=True)])


def in_turn(steps: Sequence[Finish]) -> Finish | None:
    """Several steps as one."""
    if len(steps) > 1:
        return partial(_run, steps)
    return steps[0] if steps else None


def flattened(operation: str, tensors: Sequence[Tensor]) -> Tensor:
    """The elements of all tensors, one behind the other."""
    return torch.cat([dense(operation, tensor).detach().reshape(-1) for tensor in tensors])


def reducible(operation: str, tensor: Tensor, reduce_op: Any) -> Reducible:
    """Make a tensor ready to be reduced by one of torch's `ReduceOp`s."""
    number = reduce_op.op.value
    op: Op = OPS[number] if number < len(OPS) else "sum"
    body = dense(operation, tensor)
    if number >= len(OPS):
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"{operation} (premul_sum) multiplies numbers with a fraction, not {tensor.dtype}")
        body = body.detach() * reduce_op.factor
    if tensor.dtype in REDUCIBLE:
        return Reducible(body, body, op)
    if tensor.dtype is torch.bool and op in _BOOLEAN_OPS:
        return Reducible(body, body.view(torch.uint8), _BOOLEAN_OPS[op])
    if tensor.is_complex() and op in ("sum", "avg"):
        return Reducible(body, torch.view_as_real(body.detach()), op)
    raise ValueError(f"{operation} ({op}) of {tensor.dtype} is not supported by the argosy backend: convert it before")


def same_kind(operation: str, tensor: Tensor, others: Sequence[Tensor]) -> None:
    """Refuse tensors of several types in one operation."""
    for other in others:
        if other.dtype is not tensor.dtype:
            raise ValueError(
                f"{operation}: input is {tensor.dtype} and output {other.dtype}, and they must be the same"
            )


def one_for_each(operation: str, size: int, tensor: Tensor, parts: Sequence[Tensor], what: str) -> None:
    """Refuse a list that does not hold one tensor like `tensor` for each rank."""
    if len(parts) != size:
        raise ValueError(f"{operation}: {what} has {len(parts)} tensors, and the group has {size} ranks")
    same_kind(operation, tensor, parts)
    for rank, part in enumerate(parts):
        if part.numel() != tensor.numel():
            raise ValueError(
                f"{operation}: {what}[{rank}] has {part.numel()} elements and this rank's own tensor has "
                f"{tensor.numel()}: all must have the same number. For others use all_to_all, or pad them"
            )


def times(operation: str, size: int, whole: Tensor, part: Tensor, names: tuple[str, str]) -> None:
    """Refuse a tensor that is not as large as those of all ranks together."""
    same_kind(operation, part, [whole])
    if whole.numel() != size * part.numel():
        raise ValueError(
            f"{operation}: the {names[0]} has {whole.numel()} elements, and {size} ranks x {part.numel()} of the "
            f"{names[1]} make {size * part.numel()}"
        )


def splits(operation: str, size: int, tensor: Tensor, rows: Sequence[int], what: str) -> list[int]:
    """How many elements of `tensor` belong to each rank: torch counts in rows, and none at all means equal parts."""
    height = tensor.shape[0] if tensor.dim() else 0
    if not rows:
        if height % size:
            raise ValueError(
                f"{operation}: {height} rows of the {what} do not divide by {size} ranks: give {what}_split_sizes"
            )
        return [tensor.numel() // size] * size
    if len(rows) != size or sum(rows) != height or min(rows) < 0:
        raise ValueError(
            f"{operation}: {what}_split_sizes {list(rows)} must be {size} numbers, one for each rank, that add up to "
            f"the {height} rows of the {what}"
        )
    width = tensor.numel() // height if height else 0
    return [each * width for each in rows]


def _run(steps: Sequence[Finish]) -> None:
    for step in steps:
        step()


def _copy(tensor: Tensor, result: Tensor) -> None:
    tensor.detach().copy_(result)


def _copy_parts(tensors: Sequence[Tensor], flat: Tensor) -> None:
    start = 0
    for tensor in tensors:
        end = start + tensor.numel()
        tensor.detach().copy_(flat[start:end].view(tensor.shape))
        start = end
