"""Progress on the screen: a live line in a terminal, plain lines elsewhere.

It is fed with the events of the first rank, by the launcher, or by the worker itself where there is no launcher.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

from argosy.observe.events import Event


class Progress(ABC):
    """Shows how far training is. Feed it every event; it picks those that matter."""

    def __init__(self) -> None:
        self._speed = Smoothed()

    def show(self, event: Event) -> None:
        """Take notice of an event."""
        if event["event"] == "step" and event["batches"]:
            if event["samples_per_second"]:
                self._speed.add(event["samples_per_second"])
            self._step(event)

    def describe(self, event: Event) -> str:
        """A step in words: loss, samples per second, and the time left in this epoch."""
        words = [f"loss {float(event['loss']):.4f}"] if "loss" in event else []
        if self._speed.value:
            words.append(f"{self._speed.value:,.0f} samples/s")
            left = (event["batches"] - event["batch"] - 1) * event["samples"] / self._speed.value
            words.append(f"ETA {clock_time(left)}")
        return "  ".join(words)

    @abstractmethod
    def _step(self, event: Event) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Leave the screen in order."""


class Smoothed:
    """A running mean in which older values fade."""

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, value: float) -> None:
        """Count a new value."""
        self.value = value if not self.value else 0.9 * self.value + 0.1 * value


class LiveProgress(Progress):
    """One line at the bottom of the terminal, redrawn in place; what is printed meanwhile scrolls above it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._bar = RichProgress(
            TextColumn("[bold]epoch {task.fields[epoch]}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            console=Console(file=stream),
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("", total=None, epoch=1, words="", visible=False)

    def _step(self, event: Event) -> None:
        self._bar.start()
        self._bar.update(
            self._task,
            total=event["batches"],
            completed=event["batch"] + 1,
            epoch=event["epoch"] + 1,
            words=self.describe(event),
            visible=True,
        )

    def close(self) -> None:
        """Take the line away."""
        self._bar.stop()


class PlainProgress(Progress):
    """A line now and then: every few seconds, and at the end of an epoch that took a while."""

    def __init__(
        self, stream: TextIO, interval_seconds: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._stream, self._interval, self._clock = stream, interval_seconds, clock
        self._last = clock()
        self._unsaid: Event | None = None

    def _step(self, event: Event) -> None:
        self._unsaid = event
        since = self._clock() - self._last
        ends = event["batch"] + 1 == event["batches"]
        if since >= self._interval or (ends and since >= self._interval / 5):
            self._say()

    def close(self) -> None:
        """Say the last step, if it was not said yet."""
        self._say()

    def _say(self) -> None:
        event, self._unsaid = self._unsaid, None
        if event is not None:
            self._last = self._clock()
            where = f"epoch {event['epoch'] + 1} step {event['batch'] + 1}/{event['batches']}"
            # In one piece: print writes the line's end by itself, and stdout may go to the same file.
            self._stream.write(f"{where}  {self.describe(event)}\n")
            self._stream.flush()


def progress_on(stream: TextIO) -> Progress:
    """The kind of progress that suits a stream."""
    return LiveProgress(stream) if stream.isatty() else PlainProgress(stream)


def clock_time(seconds: float) -> str:
    """Seconds as a clock shows them.

    >>> clock_time(75), clock_time(3671)
    ('1:15', '1:01:11')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
