"""One stage of a model as a module: it takes what the stage before sends, and returns what goes to the next one.

The last stage returns the loss of its micro-batch, weighted by its samples, so that the sum over micro-batches is the
mean over the batch however uneven they are; or the output, in evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from argosy.parallel.pipeline.gate import Gate, StageRun, Stop
from argosy.parallel.pipeline.ghost import Ghost
from argosy.parallel.pipeline.micro_batches import MicroBatch

LossFunction = Callable[[Any, Any], Tensor]


class Divided(Protocol):
    """A model whose layers are divided along another axis, of which each rank computes some (`parallel/tensor/`)."""

    def whole_step(self) -> AbstractContextManager[None]:
        """In this block outputs stay divided, and losses are computed so."""

    def whole(self, output: Any) -> Any:
        """An output or a loss, as plain tensors, the same on all ranks of that axis."""


class StageModule(nn.Module):
    """A stage. `owned` are modules of the model itself, and `used` the names of all the tensors that it computes with.

    These may be more than what `owned` has: a parameter of the model itself, or of a layer of another stage.
    """

    def __init__(
        self,
        model: nn.Module,
        owned: Sequence[nn.Module],
        used: Container[str],
        gate: Gate,
        ghost: Ghost,
        bounds: tuple[str | None, str | None],
        travels: Mapping[str, tuple[int, ...]],
    ) -> None:
        super().__init__()
        self.owned = nn.ModuleList(owned)
        self._whole = (model,)  # in a tuple: not a part of this module, unless it is owned
        self._used, self._gate, self._ghost, self._bounds, self._travels = used, gate, ghost, bounds, travels
        self._batch: Sequence[MicroBatch] = ()
        self._loss_fn: LossFunction | None = None
        self._scale = 1.0
        self.chunk = 0  # the micro-batch that comes next
        self.loss = 0.0  # of this step so far
        self.divided: Divided | None = None  # set if the model's layers are divided, too

    @property
    def is_last(self) -> bool:
        """Whether the model's output comes from here."""
        return self._bounds[1] is None

    @property
    def device(self) -> torch.device:
        """Where this stage runs."""
        return next((tensor.device for tensor in self.parameters()), torch.device("cpu"))

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """All that it trains. A schedule that computes gradients of weights apart does so for these."""
        owned = dict.fromkeys(super().parameters(recurse))
        used = [each for name, each in self._whole[0].named_parameters() if name in self._used]
        yield from (owned | dict.fromkeys(used) if recurse else owned)

    def begin(self, batch: Sequence[MicroBatch], loss_fn: LossFunction | None, scale: float = 1.0) -> None:
        """Another step: the micro-batches of all stages; without a loss it is evaluation."""
        self._batch, self._loss_fn, self._scale, self.loss = batch, loss_fn, scale, 0.0

    def forward(self, *received: Tensor) -> Any:
        """Run the model's forward from the beginning of this stage to its end."""
        part = self._batch[self.chunk]
        run = StageRun(self._ghost, *self._bounds, self.chunk, received, self._travels)
        divided = self.divided if self._loss_fn is not None else None
        with divided.whole_step() if divided is not None else nullcontext():
            try:
                with self._gate.open(run):
                    output = self._whole[0](*part.args, **part.kwargs)
            except Stop as stop:
                return tuple(_no_view(self._plain(tensor).contiguous()) for tensor in stop.tensors)
            if self._loss_fn is None:
                return output
            loss = self._plain(self._loss_fn(output, part.y))
        if loss.dim():
            raise ValueError(f"the loss has shape {tuple(loss.shape)}; loss_fn(output, y) is a mean over the samples")
        if part.weight:
            self.loss += float(loss.detach()) * part.weight
        return loss * (part.weight * self._scale)

    def _plain(self, tensor: Tensor) -> Tensor:
        """What leaves the stage is whole: other stages know nothing of how this one's layers are divided."""
        plain: Tensor = tensor if self.divided is None else self.divided.whole(tensor)
        return plain


def _no_view(tensor: Tensor) -> Tensor:
    """The same numbers in memory of their own: torch detaches what a stage has sent, which views do not allow."""
    return tensor.clone() if tensor._is_view() else tensor
