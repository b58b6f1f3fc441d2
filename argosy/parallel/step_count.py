"""How many steps a job has trained, those of the run that it continues included; each is told to the meter.

Of several optimizers in turn, such as a GAN's, the first one counts the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from argosy.data.cursor import Cursor, Position
from argosy.observe.meter import Meter


class StepCount:
    """The steps of a job's optimizers so far."""

    def __init__(self, cursor: Cursor, meter: Meter) -> None:
        self._cursor, self._meter = cursor, meter
        self._before = 0  # of the run that this one continues
        self._counted: Position | None = None
        self._counting: Optimizer | None = None

    @property
    def total(self) -> int:
        """All steps, of earlier runs too, and those that others made without this worker."""
        return self._before + self._meter.steps + self._cursor.passed

    def go_on_from(self, total: int) -> None:
        """So many there were when the checkpoint that was loaded was saved."""
        self._before = total - self._meter.steps - self._cursor.passed

    def watch(self, optimizer: Optimizer) -> Callable[[], None]:
        """Count an optimizer's steps; returns what ends that."""
        return optimizer.register_step_post_hook(self._stepped).remove

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        self._cursor.steps += 1
        if not self._cursor.closes:
            return
        at, loss = self._cursor.at, self._cursor.mean_loss
        if at is not None and at == self._counted and optimizer is not self._counting:
            return
        self._counted, self._counting = at, optimizer
        self._cursor.mean_loss = None
        pushed, self._cursor.pushed = self._cursor.pushed, None
        if at is None:
            self._meter.step(epoch=0, batch=self._meter.steps, batches=0, samples=0, loss=loss, pushed=pushed)
        else:
            where = {"epoch": at.epoch, "batch": at.step, "batches": at.steps, "samples": at.total}
            self._meter.step(**where, loss=loss, pushed=pushed)
