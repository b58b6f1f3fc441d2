"""Memory that all ranks of a host map: each allocates from its own part, and any of them may use what another has."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from typing import Final, NoReturn

import torch
from torch import Tensor

from argosy._native import Engine

_NONE: Final = -1


def empty(engine: Engine, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros, whose memory is given back with it."""
    if not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"empty{tuple(shape)}: give the sizes as whole numbers, such as empty(3, 4)")
    elements = math.prod(shape)
    if elements == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    size_bytes = elements * dtype.itemsize
    try:
        place = engine.allocate(size_bytes)
    except MemoryError:
        _does_not_fit(size_bytes)
    memory = (ctypes.c_char * size_bytes).from_address(place)
    weakref.finalize(memory, engine.release, place).atexit = False
    return torch.frombuffer(memory, dtype=dtype, count=elements).view(tuple(shape))


def offset(engine: Engine, size_bytes: int) -> int:
    """Where rank 0, which calls this, has allocated so many bytes for all; the others learn it from rank 0."""
    try:
        return engine.allocate(size_bytes) - engine.heap_of(0)
    except MemoryError:
        return _NONE  # told to all, so that all of them raise


def address(engine: Engine, place: int, size_bytes: int) -> int:
    """Where this process sees what rank 0 has allocated at an offset."""
    if place == _NONE:
        _does_not_fit(size_bytes)
    return engine.heap_of(0) + place


def _does_not_fit(size_bytes: int) -> NoReturn:
    raise MemoryError(f"{size_bytes} bytes do not fit into the memory that this host's ranks share") from None
