"""Changes in place: those of divided tensors that would be lost are refused.

A view along the dimension that is divided, or one that only a gathered tensor has, is a copy: whatever is written into
it does not reach the tensor that it was taken of, as it would in one process. Such copies are marked, and so are views
of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch import Tensor
from torch.distributed.tensor import DTensor

_MARK: Final = "_argosy_is_a_copy"
_TELLING: Final = frozenset({"__index__", "__int__", "__iter__", "__invert__"})
_VIEWS: Final = frozenset(
    {"__getitem__", "view", "view_as", "unflatten", "transpose", "permute", "t", "movedim", "moveaxis", "swapaxes"}
    | {"swapdims", "narrow", "select", "split", "chunk", "tensor_split", "unbind", "squeeze", "unsqueeze", "diagonal"}
)
_OFTEN_VIEWS: Final = frozenset({"reshape", "flatten", "ravel"})  # of what is contiguous


def changed(func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor that a function of torch changes in place, if it changes one."""
    name = getattr(func, "__name__", "")
    changes = (
        name == "__setitem__"
        or (name.startswith("__i") and name not in _TELLING)
        or (name.endswith("_") and not name.endswith("__"))
        or kwargs.get("inplace") is True
    )
    return next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None) if changes else None


def is_copy(tensor: Tensor) -> bool:
    """Whether a change of it would be lost."""
    return hasattr(tensor, _MARK)


def mark(func: Any, args: Any, result: Any, *, is_divided: bool) -> None:
    """Mark what a function gives of a divided tensor, or of a copy, if it would be a view in one process and is not."""
    if not args or not isinstance(tensor := args[0], Tensor) or not (is_divided or is_copy(tensor)):
        return
    name = getattr(func, "__name__", "")
    views = name in _VIEWS or (name in _OFTEN_VIEWS and tensor.is_contiguous())
    if not views or (name == "__getitem__" and not _is_basic(args[1])):
        return
    for each in _tensors(result):
        if is_copy(tensor) or _memory(each) != _memory(tensor):
            setattr(each, _MARK, True)


def sets_a_copy(func: Any, args: Any) -> bool:
    """Whether `tensor[index] = ...` would be lost."""
    if getattr(func, "__name__", "") != "__setitem__" or not _is_basic(args[1]):
        return False
    return _memory(args[0][args[1]]) != _memory(args[0])


def _is_basic(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return not any(isinstance(part, Tensor | list | bool) or hasattr(part, "__array__") for part in parts)


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for each in result:
            yield from _tensors(each)


def _memory(tensor: Tensor) -> int:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage().data_ptr()
