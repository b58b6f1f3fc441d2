"""Gradients put aside: those of batches that are part of a step which a later batch closes.

With `accumulate=k` the gradients of each batch are reduced at once, into the worker's own part, and put aside until the
batch that closes the step: whole gradients would not fit, if the model had to be divided. In between, `p.grad` is None,
so a script's `optimizer.step()` does nothing.
"""

from __future__ import annotations

from torch import Tensor, nn

from argosy.data.cursor import Cursor


class Aside:
    """What has been added up of one model's step."""

    def __init__(self, model: nn.Module, cursor: Cursor) -> None:
        self._model, self._cursor = model, cursor
        self._kept: dict[nn.Parameter, Tensor] = {}
        self._begun: tuple[int, int] | None = None

    def begin(self) -> None:
        """A pass begins: if it opens a step, what is left of one that was broken off is forgotten."""
        at = self._cursor.at
        if at is not None and at.opens and self._begun != (at.epoch, at.step):
            self._kept.clear()
        self._begun = (at.epoch, at.step) if at is not None else None

    def forget(self) -> None:
        """The step will not be closed."""
        self._kept.clear()

    def put(self) -> None:
        """Put the gradients of a pass aside."""
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                kept = self._kept.get(parameter)
                self._kept[parameter] = parameter.grad if kept is None else kept.add_(parameter.grad)
                parameter.grad = None

    def take(self) -> None:
        """Add what was put aside to the gradients of the pass that closes the step."""
        for parameter, kept in self._kept.items():
            parameter.grad = kept if parameter.grad is None else parameter.grad.add_(kept)
        self._kept.clear()
