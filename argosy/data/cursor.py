"""The cursor: the batch that is being trained on now.

The loader moves it, the gradient average reads this worker's sample count from it, and the events are told from it.
One per job, made by `Fleet` and handed to those three.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from argosy.data.pace import CommonSteps


@dataclass(frozen=True)
class Position:
    """A batch: its place in the epoch, this worker's samples and the whole job's."""

    epoch: int
    step: int
    steps: int
    samples: int
    total: int
    merged: int  # samples of the whole step, if its gradient is that of several batches: see `accumulate`
    closes: bool = True  # whether this batch is the last one of the step
    opens: bool = True  # whether it is the first
    is_even: bool = False  # whether all workers have the same number of samples


class Cursor:
    """Where the job is.

    `weight` is how much this worker counts in a mean: the samples of the batch in hand or, when a loop over a loader
    has ended, the samples that it saw in that loop. `loss` is this worker's, as the script reported it, and
    `mean_loss` the whole job's. `between_loops` is called when a loop over a loader begins, and when it has run to its
    end: there all workers are at the same place.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.waited_seconds = 0.0
        self.meetings = 0
        self.between_loops: list[Callable[[], None]] = []
        self.coming: list[Callable[[Any, Any], None]] = []  # who wants to see batches ahead of time: see `ahead.py`
        self.common: CommonSteps | None = None  # steps that may go on without this worker: see `pace.py`
        self.passed = 0  # of these, how many have
        self.steps = 0  # that optimizers of the script have made
        self.pushed: float | None = None  # when servers were told of the last step: the time of day
        self.weight = 1.0
        self.loss: float | None = None
        self._losses, self._reported = 0.0, 0.0  # of batches that were added up: losses times samples, and samples
        self.mean_loss: float | None = None
        self._live: dict[int, Position] = {}  # by loader, the last to move last: loops nest, and may run side by side
        self._seen: dict[int, object] = {}  # all loaders that were iterated, the last one last
        self._moved: set[int] = set()  # loaders whose batch may be in the next loss

    @property
    def at(self) -> Position | None:
        """The batch in hand; None outside the loop over any distributed loader."""
        return next(reversed(self._live.values()), None)

    @property
    def epochs(self) -> float | None:
        """How many epochs have passed, with a fraction; None outside the loop over any distributed loader."""
        return None if self.at is None else self.at.epoch + self.at.step / self.at.steps

    @property
    def loader(self) -> object:
        """Whose batch that is; outside any loop, the loader that was iterated last."""
        return self._seen[next(reversed(self._live or self._seen))] if self._seen else None

    @property
    def samples(self) -> float:
        """How much this worker's gradients count: its samples or, outside a distributed loader's loop, 1."""
        return 1 if self.at is None else self.at.samples

    def move(self, loader: object, position: Position) -> None:
        """A loader begins another batch."""
        if self.loss is not None:
            warnings.warn(
                "fleet.report(loss) came after loss.backward(), so the loss was not shown: it travels with the "
                "gradients; report it before",
                stacklevel=3,
            )
        self.loss = None
        self._live.pop(id(loader), None)
        self._live[id(loader)] = position
        self._seen.pop(id(loader), None)
        self._seen[id(loader)] = loader
        self._moved.add(id(loader))
        self.weight = position.samples

    def leave(self, loader: object, seen: int) -> None:
        """A loader's loop has ended after `seen` samples; an outer loop goes on with the batch that it has in hand."""
        self._live.pop(id(loader), None)
        self.weight = seen if self.at is None else self.at.samples

    def share(self, workers: int) -> float:
        """How much of the step's gradient this worker's batch is: its samples of all that are in the step.

        Outside a distributed loader's loop all workers count the same.
        """
        return 1 / workers if self.at is None else self.at.samples / self.at.merged

    def part(self, workers: int) -> float:
        """How much of the batch in hand, the whole job's, is this worker's."""
        return 1 / workers if self.at is None else self.at.samples / self.at.total

    @property
    def is_even(self) -> bool:
        """Whether all workers count the same."""
        return self.at is None or self.at.is_even

    @property
    def closes(self) -> bool:
        """Whether the batch in hand is the last one of its step: the only one, unless several are accumulated."""
        return self.at is None or self.at.closes

    def keep_loss(self) -> None:
        """The reported loss is part of a step that is not closed yet."""
        if self.loss is not None:
            self._losses += self.loss * self.samples if self.samples else 0.0
            self._reported += self.samples
        self.loss = None

    def take_losses(self) -> tuple[float, float]:
        """The reported losses of the step, each times its samples, and those samples; once."""
        self.keep_loss()
        taken = self._losses, self._reported
        self._losses, self._reported = 0.0, 0.0
        return taken

    def have_own_loss(self) -> None:
        """Where no worker tells the others of a step: its mean loss is that of this worker's batches."""
        losses, reported = self.take_losses()
        self.mean_loss = losses / reported if reported else None

    @contextmanager
    def waiting(self, meets: bool = True) -> Iterator[None]:
        """Around every wait for all other workers: their slowness is not to be taken for this worker's own work.

        `meets` if that is where a step's work ends, after which all are at the same place.
        """
        begun = self.clock()
        try:
            yield
        finally:
            self.waited_seconds += self.clock() - begun
            self.meetings += meets

    def take_loss(self) -> float | None:
        """The reported loss, once."""
        loss, self.loss = self.loss, None
        return loss

    def check_one_weight(self) -> None:
        """Refuse loaders that run side by side and divide their batches differently: no one weight would be right.

        Only those count that have moved since it was last asked: the batch of another is not in this loss.
        """
        shares = [(at.samples, at.total) for loader, at in self._live.items() if loader in self._moved]
        self._moved.clear()
        if any(samples * shares[0][1] != shares[0][0] * total for samples, total in shares):
            told = " and ".join(f"{samples} of {total} samples" for samples, total in shares)
            raise RuntimeError(
                f"several loaders are being iterated at once, and this worker holds {told}: its gradients have no "
                f"single weight; use batch sizes that the number of workers divides, drop_last=True and no balance"
            )
