"""The loader of asynchronous modes: batches from ranges of samples that this worker takes by lease.

There are no shares: a queue that the coordinator keeps (`control/leases.py`) hands out ranges of an epoch's positions
to whoever asks, so that a faster worker takes more. What stands at a position is the same function of (seed, epoch,
position) as everywhere (`order.py`), and batches begin at multiples of the script's batch size, so the batches of an
epoch are those of one process; only who trains which, and when, is open.

A batch is done when the script has come back for the one after it and what it changed has been applied (`settle`); the
queue is told of it at the end of its range or before (`progress.py`). If the script breaks off or the worker is lost,
what is not done of its ranges returns to the queue, and others train it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final, Protocol, cast

import numpy as np
from torch.utils.data import BatchSampler, DataLoader

from argosy.control.leases import Range
from argosy.data.ahead import looking_ahead
from argosy.data.batches import BatchConfig
from argosy.data.cursor import Cursor, Position
from argosy.data.loader import refuse_unusable, with_batch_sampler
from argosy.data.order import Indices
from argosy.data.plan import Plan
from argosy.data.progress import Progress, Travelling

RANGE_BATCHES: Final = 4
"""Batches in a range unless told otherwise: asking costs little beside them, and a lost worker's are soon repeated."""


class Queues(Protocol):
    """Where ranges come from: `control.lease_client.LeaseClient`."""

    def open(self, name: str, *, samples: int, batch: int, largest: int, workers: int) -> None:
        """Make a queue, unless it is there."""

    def take(self, name: str) -> Range | None:
        """The next range, waited for; None when all are done."""

    def take_now(self, name: str) -> Range | None:
        """The next range; None if there is none now."""

    def done(self, name: str, done: Range) -> None:
        """A range is done, or its first batches are."""

    def give_back(self, name: str) -> None:
        """What this worker still holds of a queue is for others."""


class LeasedLoader:
    """A worker's view of the script's DataLoader. Iterating it is this worker's part of one epoch.

    `epoch` counts the epochs begun and decides the order of the next one. `name` tells this loader's queues from those
    of others; all workers use the same. `settle` returns when all that this worker has sent has been applied.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        config: BatchConfig,
        workers: int,
        cursor: Cursor,
        queues: Queues,
        name: str,
        settle: Callable[[], None],
        lease_samples: int | None = None,
        rest: Callable[[], None] = lambda: None,
        steps_sent: int = 1,
        travelling: Travelling | None = None,
    ) -> None:
        """`rest` is called before this worker waits for samples that others hold, who are then not to wait for it.

        `steps_sent` is how many steps are sent together: a range is some times as many, as each ends with `settle`;
        or, if what they change is `travelling`, with no more than a look at how far it has come.
        """
        refuse_unusable(loader)
        batches = cast(BatchSampler, loader.batch_sampler)
        if type(batches) is not BatchSampler:
            raise TypeError(
                f"batches come from the script's {type(batches).__name__}, whose samples have no fixed positions to "
                f"take by lease; give a batch_size, with a sampler if need be, or use ps=sync"
            )
        self.epoch = 0
        self._inside = False
        self._script, self._cursor, self._workers = loader, cursor, workers
        self._queues, self._name, self._settle, self._rest = queues, name, settle, rest
        self._steps_sent, self._travelling = steps_sent, travelling
        self._progress: Progress | None = None  # of the loop that was begun last
        self._late: Exception | None = None  # what came of a loop that the script had left, and nobody was told
        self._batch, self._drop_last = batches.batch_size, batches.drop_last
        usual = -(-RANGE_BATCHES // steps_sent) * steps_sent * self._batch
        self._largest = -(-(lease_samples or usual) // self._batch) * self._batch
        self._plan = Plan(loader, config, workers=1, rank=0)  # who trains a batch is not planned
        self._sampler = _RangeSampler(self._batch)
        self._inner = with_batch_sampler(loader, self._sampler)
        self._order(0)  # a sampler that cannot be used says so now, not in the middle of a job

    @property
    def arithmetic(self) -> str:
        """How an epoch is divided, in one line."""
        samples = self._order(0)[1]
        return (
            f"batch {self._batch}, a step of its own; an epoch of {samples} samples = {self._batches(samples)} "
            f"batches, which {self._workers} workers take by lease, up to {self._largest // self._batch} at a time"
        )

    @property
    def batch_sizes(self) -> tuple[int, int]:
        """The script's batch and that of a step: the same, as a step is one worker's."""
        return self._batch, self._batch

    @property
    def global_batch(self) -> int:
        """How large a step is, unless the epoch ends in it."""
        return self._batch

    def steps_in(self, epochs: int) -> int:
        """How many steps all workers together make in the first epochs of a run."""
        return sum(self._batches(self._order(number)[1]) for number in range(epochs))

    def outline(self) -> list[str]:
        """What must be the same on all workers."""
        return [self.arithmetic, *self._plan.outline()]

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps: the epoch. Inside one, what is done is no prefix that could be continued after."""
        if self._inside:
            raise RuntimeError(
                "a loader whose samples are taken by lease cannot be saved inside its epoch, where each worker is "
                "somewhere else: save when the loop over it has ended, or save without the loader"
            )
        return {"epoch": self.epoch, "samples": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue with the epoch after those that an earlier run has trained on."""
        if state["samples"]:
            raise RuntimeError(
                f"this checkpoint was saved {state['samples']} samples into epoch {state['epoch']}, and leases begin "
                f"with whole epochs: continue it with ps=sync or without ps, or load without the loader"
            )
        self.epoch = state["epoch"]

    def __len__(self) -> int:
        """Batches of an epoch for each worker, if all are equally fast."""
        return -(-self._batches(self._order(self.epoch)[1]) // self._workers)

    def __iter__(self) -> Iterator[Any]:
        self._raise_late()
        number, self.epoch, self._inside = self.epoch, self.epoch + 1, True
        order, samples = self._order(number)
        queue, steps, seen = f"{self._name}/{number}", self._batches(samples), 0
        self._queues.open(queue, samples=samples, batch=self._batch, largest=self._largest, workers=self._workers)
        self._progress = progress = Progress(
            self._queues, queue, self._settle, self._steps_sent, self._cursor, self._travelling
        )
        try:
            # The inner loader asks for more by itself while there is any. Here are the first range, and one that came
            # back when all were out.
            while (first := self._take(queue)) is not None:
                self._sampler.begin(first, order, lambda: self._queues.take_now(queue))
                for batch in looking_ahead(self._inner, self._cursor.coming):
                    part, ends = self._sampler.handed.popleft()
                    size = part.end - part.begin
                    seen += size
                    step = part.begin // self._batch
                    self._cursor.move(self, Position(number, step, steps, size, size, size, is_even=True))
                    progress.begin(part, ends=ends)
                    yield batch
                    progress.come_back()
                progress.pause()
            self._inside = False
            # All ranges are done, whoever had them: what all workers have changed is there for each to see.
            for meet in self._cursor.between_loops:
                meet()
        except GeneratorExit:
            # The script has broken off. Others wait for what is held here: let them have it.
            self._break_off(progress)
            with suppress(ConnectionError):  # who has left the job holds nothing
                self._queues.give_back(queue)
            self._inside = False
            raise
        finally:
            self._cursor.leave(self, seen)

    def leave(self) -> None:
        """The job is left, perhaps inside a loop: the queue is told what was trained of it, and a late error raised."""
        if self._progress is not None:
            self._break_off(self._progress)
        self._raise_late()

    def _break_off(self, progress: Progress) -> None:
        try:
            progress.break_off()
        except ConnectionError:  # the coordinator has gone, or was left
            pass
        except Exception as error:  # a generator that is closed has nobody to tell it to
            self._late = error

    def _raise_late(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            raise late

    def _take(self, queue: str) -> Range | None:
        """The next range, waited for if need be; None when all are done."""
        taken = self._queues.take_now(queue)
        if taken is None:
            self._rest()
            taken = self._queues.take(queue)
        return taken

    def _order(self, number: int) -> tuple[Callable[[Indices], Indices], int]:
        """What stands at each position of an epoch, and how many positions are trained on."""
        order, samples = self._plan.order(number)
        return order, samples - samples % self._batch if self._drop_last else samples

    def _batches(self, samples: int) -> int:
        return -(-samples // self._batch)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # ours, and not there yet: an object that is being copied has nothing to ask
            raise AttributeError(name)
        return getattr(self._script, name)


class _RangeSampler:
    """The batch sampler that replaces the script's: batches of a range, then of those that can be had at once.

    `handed` has what was given to the inner loader, in the order in which its batches come: positions, and whether a
    range ends with them. A loader with processes asks for batches ahead, so several ranges may be in it.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self.handed: deque[tuple[Range, bool]] = deque()

    def begin(self, first: Range, order: Callable[[Indices], Indices], more: Callable[[], Range | None]) -> None:
        """What the next iteration is to give."""
        self.handed.clear()
        self._first, self._order, self._more = first, order, more

    def __iter__(self) -> Iterator[list[Any]]:
        taken: Range | None = self._first
        while taken is not None:
            for begin in range(taken.begin, taken.end, self._batch):
                end = min(begin + self._batch, taken.end)
                self.handed.append((Range(begin, end), end == taken.end))
                yield self._order(np.arange(begin, end)).tolist()
            taken = self._more()
