"""The meter: counts the steps and samples of a rank and measures their speed."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from argosy.observe.events import EventLog


class Meter:
    """Writes a `step` event for each optimizer step, and the totals at the end."""

    def __init__(self, log: EventLog, clock: Callable[[], float]) -> None:
        self._log, self._clock = log, clock
        self._began = self._last = clock()
        self.steps = 0
        self.samples = 0

    def start(self, **about: Any) -> None:
        """The run begins, in this process; `about` is what else to tell of it."""
        self._log.emit("start", host=socket.gethostname(), pid=os.getpid(), **about)

    def step(
        self, *, epoch: int, batch: int, batches: int, samples: int, loss: float | None, pushed: float | None = None
    ) -> None:
        """One step of the whole job on `samples` samples, of which `loss` is the mean loss, if it is known.

        `pushed` is when servers were told of it, if there are some.
        """
        now = self._clock()
        seconds, self._last = now - self._last, now
        self.steps += 1
        self.samples += samples
        known = {} if loss is None else {"loss": loss}
        known |= {} if pushed is None else {"pushed": round(pushed, 6)}
        self._log.emit(
            "step",
            step=self.steps,
            epoch=epoch,
            batch=batch,
            batches=batches,
            samples=samples,
            seconds=round(seconds, 6),
            samples_per_second=round(samples / seconds, 3) if seconds > 0 else None,
            **known,
        )

    def end(self, status: str) -> None:
        """The run is over."""
        seconds = self._clock() - self._began
        self._log.emit("end", status=status, steps=self.steps, samples=self.samples, seconds=round(seconds, 3))
