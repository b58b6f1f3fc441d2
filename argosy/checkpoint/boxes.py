"""Boxes: the rectangular parts of a tensor that a rank holds, a file stores, or a mesh wants.

Every way to divide a tensor over ranks comes down to boxes: offsets and sizes in the whole tensor. Loading onto
another mesh is then nothing but the overlap of the boxes that are wanted with those that are stored.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

Run = tuple[int, int]  # from, up to
_MOST_CUT: Final = 8  # dimensions of one tensor along which a mesh divides it


@dataclass(frozen=True, order=True)
class Box:
    """A part of a tensor: where it begins and how far it goes, along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements it has; a number (no dimensions) has one."""
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """What two boxes of the same tensor have in common.

        >>> Box((0, 0), (4, 4)).overlap(Box((2, 3), (4, 4)))
        Box(offsets=(2, 3), sizes=(2, 1))
        """
        offsets, sizes = [], []
        for mine, length, theirs, their_length in zip(
            self.offsets, self.sizes, other.offsets, other.sizes, strict=True
        ):
            begin, end = max(mine, theirs), min(mine + length, theirs + their_length)
            if begin >= end:
                return None
            offsets.append(begin)
            sizes.append(end - begin)
        return Box(tuple(offsets), tuple(sizes))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where this box is in a tensor that holds `outer`."""
        starts = [mine - theirs for mine, theirs in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    def split(self, count: int) -> list[Box]:
        """At most `count` boxes that make up this one, cut along its first dimension that is longer than 1."""
        dim = next((dim for dim, size in enumerate(self.sizes) if size > 1), None)
        if dim is None or count < 2:
            return [self]
        parts = []
        for number in range(count):
            for begin, end in chunk([(0, self.sizes[dim])], count, number):
                offsets, sizes = list(self.offsets), list(self.sizes)
                offsets[dim] += begin
                sizes[dim] = end - begin
                parts.append(Box(tuple(offsets), tuple(sizes)))
        return parts

    def __str__(self) -> str:
        runs = zip(self.offsets, self.sizes, strict=True)
        return "[" + ",".join(f"{begin}:{begin + size}" for begin, size in runs) + "]"


def whole(shape: Sequence[int]) -> Box:
    """The box that is the whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def tile(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether boxes within a tensor make it up: each of its elements is in exactly one of them.

    A box counts 1 at its first corner, -1 at the next along any dimension, and so on, alternating. Added up over boxes
    that cover a tensor once, that leaves the tensor's own corners, and over no others: nothing is compared in pairs.

    >>> tile([Box((0,), (2,)), Box((2,), (3,))], (5,)), tile([Box((0,), (3,)), Box((2,), (2,))], (5,))
    (True, False)
    """
    if 0 in shape:
        return not boxes
    cut = [dim for dim, size in enumerate(shape) if any(box.sizes[dim] != size for box in boxes)]
    if len(cut) > _MOST_CUT:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for box, sign in [*((box, 1) for box in boxes), (whole(shape), -1)]:
        ends = [((box.offsets[dim], 1), (box.offsets[dim] + box.sizes[dim], -1)) for dim in cut]
        for corner in itertools.product(*ends):
            corners[tuple(at for at, _ in corner)] += sign * math.prod(factor for _, factor in corner)
    return not any(corners.values())


def chunk(runs: list[Run], count: int, number: int) -> list[Run]:
    """Part `number` of `count` of what the runs cover, divided as `torch.chunk` does: the last get less, or nothing.

    >>> chunk([(0, 5)], 2, 1), chunk([(0, 2), (10, 12)], 2, 0), chunk([(0, 2)], 4, 3)
    ([(3, 5)], [(0, 2)], [])
    """
    length = sum(end - begin for begin, end in runs)
    size = -(-length // count)
    first, last = min(number * size, length), min((number + 1) * size, length)
    parts, position = [], 0
    for begin, end in runs:
        low, high = max(first - position, 0), min(last - position, end - begin)
        if low < high:
            parts.append((begin + low, begin + high))
        position += end - begin
    return parts


def interleaved(runs: list[Run], pieces: int, count: int, number: int) -> list[Run]:
    """Part `number` of `count` of each of so many pieces: how a strided placement divides."""
    parts: list[Run] = []
    for piece in range(pieces):
        parts += chunk(chunk(runs, pieces, piece), count, number)
    return parts


def boxes_of(runs: Sequence[list[Run]]) -> Iterator[tuple[Box, Box]]:
    """The boxes that runs along each dimension make: each in the whole tensor, and in the part that holds them all."""
    placed = []
    for along in runs:
        positions = itertools.accumulate((end - begin for begin, end in along), initial=0)
        placed.append(list(zip(along, positions, strict=False)))
    for chosen in itertools.product(*placed):
        sizes = tuple(end - begin for (begin, end), _ in chosen)
        if 0 not in sizes:
            yield Box(tuple(begin for (begin, _), _ in chosen), sizes), Box(tuple(at for _, at in chosen), sizes)
