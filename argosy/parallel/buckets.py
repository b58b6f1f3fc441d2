"""Buckets: where gradients live while they are averaged, and the place that each parameter has in one.

A bucket is one stretch of memory that the group reduces fastest (shared by the ranks of a host). In it, one behind the
other, lie the gradients of parameters that backward produces one after the other. A `Place` moves what autograd has
made into the bucket, weighted, and makes `p.grad` a view of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from argosy.comm.group import Group
from argosy.compress.codec import Bucket, Part


class Place:
    """One parameter's gradient in a bucket."""

    def __init__(self, name: str, parameter: nn.Parameter, flat: Tensor, begin: int, in_order: bool) -> None:
        """`in_order`: the numbers lie as a contiguous tensor has them, whatever the parameter's own order is."""
        self.name, self.parameter = name, parameter
        self.end = begin + parameter.numel()
        numbers = flat[begin : self.end]
        self.view = numbers.view(parameter.shape) if in_order else _like(parameter, numbers)
        self.part = Part(name, tuple(parameter.shape), begin, self.end)
        self.was_used = False  # by anyone, in any step
        self.holds = False  # whether a gradient of this step, or several added up, is in the bucket

    @torch.no_grad()
    def take(self, weight: float) -> None:
        """Add the parameter's gradient, if there is one, times `weight`, to what the bucket holds.

        A worker without a sample adds nothing, whatever its gradients are: NaN, most likely.
        """
        grad = self.parameter.grad
        if grad is None or grad.layout != torch.strided or not weight:  # sparse ones go another way
            if not self.holds:
                self.view.zero_()
            return
        if self.holds:
            self.view.add_(grad, alpha=weight)
        elif grad.is_cpu:
            # If it is the bucket's own view, the script has not cleared it: autograd has added to it.
            torch.mul(grad, weight, out=self.view)
        else:
            self.view.copy_(grad.mul(weight))
        self.holds = True

    def give(self) -> None:
        """Let the parameter's gradient be what the bucket holds."""
        self.holds = False
        parameter = self.parameter
        parameter.grad = self.view if parameter.is_cpu else self.view.to(parameter.device)


class Filling:
    """A bucket that gradients come into."""

    def __init__(self, group: Group, members: Sequence[tuple[str, nn.Parameter]], in_order: bool) -> None:
        dtype = members[0][1].dtype
        count = sum(parameter.numel() for _, parameter in members)
        if dtype.is_complex:
            self.flat = group.empty(2 * count, dtype=dtype.to_real())
            numbers = torch.view_as_complex(self.flat.view(-1, 2))
        else:
            self.flat = numbers = group.empty(count, dtype=dtype)
        self.places: list[Place] = []
        begin = 0
        for name, parameter in members:
            self.places.append(Place(name, parameter, numbers, begin, in_order))
            begin = self.places[-1].end
        self.bucket = Bucket(self.flat, tuple(place.part for place in self.places))
        self.compressible = dtype == torch.float32
        self.missing = len(self.places)


def cut(named: Sequence[tuple[str, nn.Parameter]], most_bytes: int) -> list[list[tuple[str, nn.Parameter]]]:
    """Parameters in the order given, in buckets of one type and at most so many bytes; a larger one has its own."""
    buckets: list[list[tuple[str, nn.Parameter]]] = []
    room: dict[torch.dtype, int] = {}
    latest: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        size = parameter.numel() * parameter.element_size()
        if size > room.get(parameter.dtype, 0):
            latest[parameter.dtype] = []
            room[parameter.dtype] = most_bytes
            buckets.append(latest[parameter.dtype])
        latest[parameter.dtype].append((name, parameter))
        room[parameter.dtype] -= size
    return buckets


def _like(parameter: nn.Parameter, numbers: Tensor) -> Tensor:
    """The numbers in the parameter's shape and, where it fills its memory without gaps, in its order."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return (
        numbers.as_strided(parameter.shape, strides) if strides == parameter.stride() else numbers.view(parameter.shape)
    )
