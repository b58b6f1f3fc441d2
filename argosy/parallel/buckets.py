"""Buckets: where gradients are averaged, and the place that each parameter has in one.

Small gradients that backward produces one after the other are gathered in one stretch of memory, which the ranks of a
host share, and `p.grad` is a view of it. A large gradient is a bucket by itself, where autograd has made it.

[Note: gathered or not]
Moving a gradient into shared memory costs a read and a write of it, after which the engine reduces it in place, with
another of each. Through its window the engine reduces a tensor that lies anywhere, with a read and a write in all, the
window itself staying in the cache. So only gradients for which an operation of their own would cost more are gathered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from argosy.comm.group import Group
from argosy.compress.codec import Bucket, Part

LARGE_BYTES: Final = 1 << 20  # a gradient of this size is a bucket by itself


class Place(ABC):
    """One parameter's gradient in a bucket. `view` is where its numbers are."""

    view: Tensor

    def __init__(self, name: str, parameter: nn.Parameter, begin: int = 0) -> None:
        self.name, self.parameter, self.dtype = name, parameter, parameter.dtype
        self.part = Part(name, tuple(parameter.shape), begin, begin + parameter.numel())
        self.holds = False  # whether a gradient of this step, or several added up, is here
        self.arrived = False  # whether one has come in this pass

    def take(self, weight: float | None) -> None:
        """Add the parameter's gradient, if there is one, times `weight` (or as it is), to what is here.

        A worker without a sample adds nothing, whatever its gradients are: NaN, most likely.
        """
        grad = self.parameter.grad
        if grad is not None and grad.layout == torch.strided and weight != 0:  # sparse ones go another way
            self._add(grad.detach(), weight)
            self.holds = True
        elif not self.holds:
            self._clear()

    @abstractmethod
    def give(self) -> None:
        """Let the parameter's gradient be what is here."""

    @abstractmethod
    def _add(self, grad: Tensor, weight: float | None) -> None: ...

    @abstractmethod
    def _clear(self) -> None: ...


class Gathered(Place):
    """A small gradient, moved into a bucket; or any, if batches are added up there."""

    def __init__(self, name: str, parameter: nn.Parameter, numbers: Tensor, begin: int, in_order: bool) -> None:
        """`in_order`: the numbers lie as a contiguous tensor has them, whatever the parameter's own order is."""
        super().__init__(name, parameter, begin)
        mine = numbers[begin : self.part.end]
        own_order = not in_order and _fills_its_memory(parameter)
        self.view = mine.as_strided(parameter.shape, parameter.stride()) if own_order else mine.view(parameter.shape)

    def give(self) -> None:
        """A view of the bucket."""
        self.parameter.grad = self.view if self.parameter.is_cpu else self.view.to(self.parameter.device)

    def _add(self, grad: Tensor, weight: float | None) -> None:
        if not grad.is_cpu:
            grad = grad.cpu()
        if self.holds:
            self.view.add_(grad, alpha=1.0 if weight is None else weight)
        elif weight is not None:
            # If it is the bucket's own view, the script has not cleared it: autograd has added to it.
            torch.mul(grad, weight, out=self.view)
        elif grad.data_ptr() != self.view.data_ptr():
            self.view.copy_(grad)

    def _clear(self) -> None:
        self.view.zero_()


class Alone(Place):
    """A large gradient, left where autograd has made it."""

    def __init__(self, name: str, parameter: nn.Parameter, weighs: bool) -> None:
        """`weighs`: it is multiplied by its weight here; otherwise whoever reads it does that."""
        super().__init__(name, parameter)
        self._weighs, self.weight = weighs, 1.0

    def give(self) -> None:
        """What autograd made; or, where it made none, what the others did."""
        self.parameter.grad = self.view

    def _add(self, grad: Tensor, weight: float | None) -> None:
        # All workers must have it in the same order; autograd mostly follows the parameter's.
        self.view = grad if grad.stride() == self.parameter.stride() else torch.empty_like(self.parameter).copy_(grad)
        if weight is not None and self._weighs:
            self.view.mul_(weight)
        elif weight is not None:
            self.weight = weight

    def _clear(self) -> None:
        self.view, self.weight = torch.zeros_like(self.parameter), 1.0


class Filling:
    """A bucket that gradients come into."""

    def __init__(self, places: Sequence[Place], numbers: Tensor | None = None) -> None:
        """`numbers`: where gathered gradients are."""
        self.places = places
        self.compressible = places[0].parameter.dtype == torch.float32
        self.missing = len(places)
        self._numbers, self._parts = numbers, tuple(place.part for place in places)

    @property
    def flat(self) -> Tensor:
        """All numbers, one behind the other."""
        if self._numbers is not None:
            return self._numbers
        place = self.places[0]
        assert isinstance(place, Alone)
        return place.view.as_strided((place.view.numel(),), (1,))

    @property
    def bucket(self) -> Bucket:
        """The same, for a codec."""
        place = self.places[0]
        return Bucket(self.flat, self._parts, place.weight if isinstance(place, Alone) else 1.0)


Named = tuple[str, nn.Parameter]


def lay_out(
    named: Sequence[Named],
    group: Group,
    most_bytes: int,
    *,
    in_order: bool = False,
    gather_all: bool = False,
    codec_weighs: bool = False,
) -> list[Filling]:
    """Buckets for parameters in the order given: large ones alone, the others gathered, at most so many bytes each.

    They are in the order in which they get full, that of their last members: they are started in it, and a bucket that
    gathers what is small in all layers, biases for instance, must not hold up the large ones in between.
    """
    buckets: dict[int, list[Named]] = {}  # by the number of the first member
    open_buckets: dict[torch.dtype, tuple[int, int]] = {}  # by type: which one, and the bytes that fit in
    for number, (name, parameter) in enumerate(named):
        which, room = open_buckets.get(parameter.dtype, (number, 0))
        if _is_large(parameter) and not gather_all:
            buckets[number] = [(name, parameter)]
            continue
        if _bytes(parameter) > room:
            which, room = number, most_bytes
        buckets[which] = [*buckets.pop(which, []), (name, parameter)]  # now it is the last one to get full
        open_buckets[parameter.dtype] = which, room - _bytes(parameter)
    fillings = []
    for bucket in buckets.values():
        name, parameter = bucket[0]
        alone = len(bucket) == 1 and _is_large(parameter) and not gather_all
        if alone and (parameter.is_contiguous() or not in_order):
            weighs = not codec_weighs or parameter.dtype != torch.float32  # codecs see nothing else
            fillings.append(Filling([Alone(name, parameter, weighs)]))
        else:
            fillings.append(_gathered(bucket, group, in_order))
    return fillings


def _gathered(members: Sequence[Named], group: Group, in_order: bool) -> Filling:
    dtype = members[0][1].dtype
    count = sum(parameter.numel() for _, parameter in members)
    if dtype.is_complex:
        flat = group.empty(2 * count, dtype=dtype.to_real())
        numbers = torch.view_as_complex(flat.view(-1, 2))
    else:
        flat = numbers = group.empty(count, dtype=dtype)
    places: list[Place] = []
    begin = 0
    for name, parameter in members:
        places.append(Gathered(name, parameter, numbers, begin, in_order))
        begin = places[-1].part.end
    return Filling(places, flat)


def _bytes(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()


def _is_large(parameter: nn.Parameter) -> bool:
    kind = parameter.is_cpu and not parameter.dtype.is_complex
    return kind and _bytes(parameter) >= LARGE_BYTES and _fills_its_memory(parameter)


def _fills_its_memory(parameter: nn.Parameter) -> bool:
    """Whether a parameter's elements lie without gaps, in whatever order."""
    return torch.empty_like(parameter, device="meta").stride() == parameter.stride()
