"""The interface that every way to compress gradients has, and what a codec is given: buckets.

A codec replaces this worker's share of a bucket's gradient, weighted by its samples, by the sum over all workers:
exactly or nearly, but with the same bits on each. What it leaves out of a sum it keeps, and adds to its next share
(error feedback).

[Note: kept]
What a codec keeps is linear in the gradients. So one rule holds for all when a checkpoint is loaded by another number
of workers: what the workers have kept is added up when it is saved, and divided equally when it is loaded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from argosy.comm.engine import EngineGroup
from argosy.comm.pending import Pending


@dataclass(frozen=True)
class Part:
    """One parameter's place in a bucket, from element `begin` to `end`. Its name is the key to what a codec keeps."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Bucket:
    """Gradients of several parameters, one behind the other in `flat`: float32, on the CPU, contiguous.

    This worker's share is `weight` times `flat`; for codecs that do not weigh, the weight is 1.
    """

    flat: Tensor
    parts: tuple[Part, ...]
    weight: float = 1.0


class Codec(ABC):
    """A way to average gradients. One object serves one model; buckets may be cut anew between steps.

    `keeps`: whether it may bring what it has kept of a parameter in a step in which nobody has used that.
    `takes_over`: whether it does a part of the optimizer's work, and so must see every gradient.
    `weighs`: whether it multiplies by a bucket's weight itself, as it reads the numbers anyway.
    """

    keeps = True
    takes_over = False
    weighs = False

    def __init__(self) -> None:
        self.bytes_sent = 0  # that this worker's shares took on the wire: what it handed to each operation

    def check(self, optimizer: Optimizer) -> None:  # noqa: B027
        """Refuse an optimizer that the codec cannot work with."""

    def attach(self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:  # noqa: B027
        """Learn what will use the gradients; the same is refused."""

    def meet(self, name: str, parameter: nn.Parameter) -> None:  # noqa: B027
        """The model has got another parameter of this name: what was kept under it is not this one's."""

    def begin_step(self, epoch: float | None) -> None:  # noqa: B027 - most codecs have nothing to do here
        """Gradients of another step will come; `epoch` counts finished epochs, with a fraction, if it is known."""

    def rescale(self, ratio: float) -> None:  # noqa: B027
        """Gradients will be so many times as large as they were, as where the scale of a loss changes."""

    def abort(self) -> None:  # noqa: B027
        """The gradients of this step will not all come: the backward pass has failed."""

    def suits(self, part: Part) -> bool:
        """Whether a parameter like this is compressed; the others travel whole."""
        return True

    @abstractmethod
    def steps(self, bucket: Bucket, group: EngineGroup) -> Iterator[Pending]:
        """Replace the bucket's numbers, this worker's share, by the sum over all workers, in steps.

        A step computes and starts an exchange; whoever runs the steps waits for it before the next. Meanwhile steps of
        other buckets may run. All workers run the same steps in the same order, not always on the same thread.
        """

    def reduce(self, bucket: Bucket, group: EngineGroup) -> None:
        """All steps, one after the other."""
        for exchange in self.steps(bucket, group):
            exchange.wait()

    def state_dict(self, group: EngineGroup) -> dict[str, Any]:
        """What the workers have kept, added up; all of them call this and get the same. See [Note: kept]."""
        return {}

    def load_state_dict(self, state: dict[str, Any], group: EngineGroup) -> None:  # noqa: B027
        """Take this worker's part of what was kept; without any, keep nothing."""


def extent(codec: Codec, parameters: Mapping[str, nn.Parameter]) -> str | None:
    """How much of a model is compressed, for the user; None if all is."""
    trained = {name: each for name, each in parameters.items() if each.requires_grad}
    numbers = {name: each.numel() for name, each in trained.items()}
    suiting = [
        name
        for name, each in trained.items()
        if each.dtype == torch.float32 and codec.suits(Part(name, tuple(each.shape), 0, numbers[name]))
    ]
    if len(suiting) == len(trained):
        return None
    if not sum(numbers[name] for name in suiting):
        return f"none of {len(trained)} parameters is compressed, as none would gain by it: gradients travel whole"
    part = sum(numbers[name] for name in suiting) / sum(numbers.values())
    return f"{len(suiting)} of {len(trained)} parameters, {100 * part:.3g} % of all numbers; the others travel whole"
