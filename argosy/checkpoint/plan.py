"""Who writes what: each box of each tensor once, spread over the ranks that hold it, so that files are about even."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from argosy.checkpoint.boxes import Box, whole
from argosy.checkpoint.errors import CheckpointError
from argosy.checkpoint.pieces import Pieces
from argosy.checkpoint.shard import DTYPES, dtype_name

_SMALL_BYTES: Final = 4096  # below this, such as counters, the lowest rank writes its own
_LARGE_BYTES: Final = 16 << 20  # above this, ranks that hold the same divide it

Described = list[Any]  # as JSON: [name, type, shape, [[offsets, sizes], ...]] of each tensor that a rank holds


@dataclass(frozen=True)
class Planned:
    """A tensor, its boxes, and the rank that writes each."""

    dtype: str
    shape: tuple[int, ...]
    boxes: list[tuple[Box, int]]


def describe(tensors: Mapping[str, Pieces]) -> Described:
    """What a rank holds, for the others to know."""
    return [
        [name, dtype_name(held.dtype, name), held.shape, [[box.offsets, box.sizes] for box, _ in held.parts]]
        for name, held in tensors.items()
    ]


def plan(held: list[Described], lowest_only: Callable[[str], bool]) -> dict[str, Planned]:
    """Divide the writing. `held` is by rank; of tensors that are `lowest_only` the lowest rank's value counts."""
    kinds, holders = _holders(held)
    load = [0] * len(held)
    planned = {name: Planned(dtype, shape, []) for name, (dtype, shape) in kinds.items()}
    shared: list[tuple[int, str, Box, list[int]]] = []
    for name, boxes in holders.items():
        item_bytes = DTYPES[kinds[name][0]].itemsize
        for box, ranks in boxes.items():
            size_bytes = box.elements * item_bytes
            if len(ranks) == 1 or size_bytes < _SMALL_BYTES or lowest_only(name):
                planned[name].boxes.append((box, ranks[0]))
                load[ranks[0]] += size_bytes
                continue
            parts = box.split(min(-(-size_bytes // _LARGE_BYTES), 4 * len(ranks)))
            shared += [(-part.elements * item_bytes, name, part, ranks) for part in parts]
    for negative_bytes, name, box, ranks in sorted(shared, key=lambda each: each[:3]):
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        planned[name].boxes.append((box, writer))
        load[writer] -= negative_bytes
    return planned


def _holders(held: list[Described]) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, dict[Box, list[int]]]]:
    """The type and shape of each tensor, and who holds which box of it."""
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    holders: dict[str, dict[Box, list[int]]] = {}
    alike: dict[int, list[int]] = {}
    for rank, described in enumerate(held):
        alike.setdefault(id(described), []).append(rank)
    for ranks in alike.values():
        for name, dtype, shape, boxes in held[ranks[0]]:
            kind = (dtype, tuple(shape))
            if kinds.setdefault(name, kind) != kind:
                known = kinds[name]
                raise CheckpointError(
                    f"{name} is {dtype} {list(shape)} on rank {ranks[0]}, and {known[0]} {list(known[1])} on others"
                )
            for offsets, sizes in boxes:
                holders.setdefault(name, {}).setdefault(Box(tuple(offsets), tuple(sizes)), []).extend(ranks)
    for name, (_, shape) in kinds.items():
        there, all_of_it = sum(box.elements for box in holders.get(name, {})), whole(shape).elements
        if there != all_of_it:
            raise CheckpointError(
                f"{name}: the parts that the ranks hold have {there} elements in all, and the tensor has {all_of_it}; "
                f"a tensor is divided over ranks in one way, and all of them save it"
            )
    return kinds, holders
