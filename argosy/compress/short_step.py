"""A short step for SGD: of a sum that is zero almost everywhere, it is shown the rest alone.

DGC's sums have a few thousand numbers that are not zero, in gradients of millions, and a plain step reads and writes
every parameter for them. So while SGD steps, `p.grad` is a sparse tensor; before and after, it is the whole gradient,
as everywhere else. If the whole one has been changed meanwhile (by clipping, say), or another is in its place, SGD
steps with what is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn


class _Sum(NamedTuple):
    numbers: Tensor  # all of them, where the gradient is
    places: Tensor  # of those that may not be zero
    version: int


class ShortSteps:
    """The sums of the last backward pass, until a step has used them."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sum] = {}
        self._shown: list[tuple[nn.Parameter, Tensor, Tensor]] = []  # with its whole gradient, and the short one

    def note(self, name: str, numbers: Tensor, places: Tensor) -> None:
        """A gradient was summed, and is zero except, perhaps, at some places, each of which is told once."""
        self._sums[name] = _Sum(numbers, places, numbers._version)

    def forget(self, name: str) -> None:
        """A gradient may be anything."""
        self._sums.pop(name, None)

    def begin(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Let these parameters have short gradients, where they are known and as they were summed."""
        for name, parameter in parameters.items():
            summed, whole = self._sums.pop(name, None), parameter.grad
            if summed is None or whole is None or not _is(whole, summed):
                continue
            places = torch.stack(torch.unravel_index(summed.places, parameter.shape))
            values = summed.numbers[summed.places]
            short = torch.sparse_coo_tensor(places, values, parameter.shape, check_invariants=False)
            parameter.grad = short
            self._shown.append((parameter, whole, short))

    def end(self) -> None:
        """Let them have their whole gradients again, unless the script has given them others (in a closure)."""
        for parameter, whole, short in self._shown:
            if parameter.grad is short:
                parameter.grad = whole
        self._shown.clear()


def _is(gradient: Tensor, summed: _Sum) -> bool:
    same_place = gradient.data_ptr() == summed.numbers.data_ptr() and gradient.is_contiguous()
    return same_place and gradient._version == summed.version
