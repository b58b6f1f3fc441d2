"""What codecs keep from step to step: numbers that they held back, found again by their parts' names, and scratch room.

Buckets may be cut anew between steps. What was held back belongs to the parameters, so it moves along with them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from argosy.comm.group import Group
from argosy.compress.codec import Bucket, Part

Made = TypeVar("Made")


class Cuts(Generic[Made]):
    """Something that is made once for each bucket, and forgotten when the bucket is cut anew."""

    def __init__(self, make: Callable[[Bucket], Made]) -> None:
        self._make = make
        self._made: dict[str, tuple[tuple[Part, ...], Made]] = {}  # by the name of the bucket's first part

    def of(self, bucket: Bucket) -> Made:
        """What was made for this bucket."""
        first = bucket.parts[0].name
        found = self._made.get(first)
        if found is None or found[0] != bucket.parts:
            names = {part.name for part in bucket.parts}
            self._made = {
                name: entry for name, entry in self._made.items() if names.isdisjoint(part.name for part in entry[0])
            }
            found = self._made[first] = (bucket.parts, self._make(bucket))
        return found[1]

    def clear(self) -> None:
        """Forget everything."""
        self._made.clear()


class Residuals:
    """What this worker has held back of each parameter's gradient: one flat tensor for each bucket."""

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}  # views into the flat tensors, or what was loaded
        self._flat = Cuts(self._gather)

    def of(self, bucket: Bucket) -> Tensor:
        """What was held back of a bucket, number by number; zeros at first. The codec changes it in place."""
        return self._flat.of(bucket)

    def part(self, name: str) -> Tensor:
        """What was held back of one parameter of a bucket."""
        return self._parts[name]

    def forget(self, name: str) -> None:
        """Of this parameter nothing was held back."""
        if self._parts.pop(name, None) is not None:
            self._flat.clear()

    def rescale(self, ratio: float) -> None:
        """Multiply all that was held back."""
        for part in self._parts.values():
            part.mul_(ratio)

    def _gather(self, bucket: Bucket) -> Tensor:
        flat = torch.zeros_like(bucket.flat)
        for part in bucket.parts:
            view = flat[part.begin : part.end].view(part.shape)
            kept = self._parts.get(part.name)
            if kept is not None:
                if kept.shape != view.shape:
                    raise ValueError(
                        f"what was held back of {part.name} has the shape {tuple(kept.shape)}, and its gradient "
                        f"{part.shape}: the codec's state is of another model"
                    )
                view.copy_(kept)
            self._parts[part.name] = view
        return flat

    def state_dict(self, group: Group) -> dict[str, Tensor]:
        """The sum over all workers, by name: see [Note: kept]."""
        if not self._parts:
            return {}
        names = sorted(self._parts)
        whole = torch.cat([self._parts[name].reshape(-1) for name in names])
        group.all_reduce(whole)
        sums = whole.split([self._parts[name].numel() for name in names])
        return {name: total.view(self._parts[name].shape) for name, total in zip(names, sums, strict=True)}

    def load_state_dict(self, state: Mapping[str, Any], group: Group) -> None:
        """Take an equal part of each sum."""
        self._flat.clear()
        self._parts = {name: total / group.size for name, total in state.items()}


def address_of(bucket: Bucket) -> int:
    """Where native code finds a bucket's numbers; raises if they are not what it would take them for."""
    flat = bucket.flat
    if flat.dtype != torch.float32 or not flat.is_cpu or not flat.is_contiguous():
        raise ValueError(
            f"the bucket that begins with {bucket.parts[0].name} is {flat.dtype} on {flat.device}; codecs take "
            f"contiguous float32 on the CPU"
        )
    return flat.data_ptr()


class Rooms:
    """Room for what is sent and received, where the group reaches it fastest."""

    def __init__(self, group: Group, rooms: dict[str, Tensor]) -> None:
        self._group, self._rooms = group, rooms

    def take(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """So many elements, with anything in them."""
        room = self._rooms.get(name)
        if room is None or room.numel() < count:
            room = self._rooms[name] = self._group.empty(count, dtype=dtype)
        return room[:count]


class Scratch:
    """Rooms that serve bucket after bucket; several, if several buckets are under way at once."""

    def __init__(self) -> None:
        self._group: weakref.ref[Group] | None = None
        self._free: list[dict[str, Tensor]] = []

    @contextmanager
    def lend(self, group: Group) -> Iterator[Rooms]:
        """Rooms for one bucket."""
        if self._group is None or self._group() is not group:  # another group: its memory is elsewhere
            self._free.clear()
            self._group = weakref.ref(group)
        rooms = self._free.pop() if self._free else {}
        yield Rooms(group, rooms)
        self._free.append(rooms)  # not if it failed: what is under way may still write there
