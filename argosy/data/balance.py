"""Balance: faster workers take more of each step's samples, so that none waits for the slowest.

A step of a synchronous job lasts as long as its slowest worker needs. `Balance` measures how many samples a second each
worker trains on, without the time that it waits for others; every few steps all workers exchange these speeds,
and each computes from the same numbers how coming steps are divided: contiguous parts, in proportion to speed, of at
least one sample. Which samples make a step does not change, so every sample is still trained exactly once.

[Note: shares of steps ahead]
A DataLoader with processes of its own asks for batches long before they are trained on: shares cannot change at once.
New ones hold from the first step that nobody has asked for yet: the present one, and as many as the DataLoader
asks for ahead, and one. The largest such number of any worker counts, for the change must be at one step on all.

[Note: what is measured]
The seconds from asking for a batch to asking for the next one are a step's, and those inside `cursor.waiting()` are not
the worker's own. A stretch ends with a step in which workers have met (`cursor.meetings`): only there are they all at
the same place and may exchange. So a loop in which they never meet, such as an evaluation, keeps its shares.

Seconds for a step are more like a + b n than b n. Dividing by n / seconds and measuring again converges, to the
shares at which all take equally long: where the fixed part a is large, in smaller paces.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Final

from argosy.data.batches import share_bounds
from argosy.data.cursor import Cursor

_WARM_UP: Final = 2  # stretches at the start that are not measured: caches fill, code is compiled
_WINDOW: Final = 8  # stretches between two decisions; doubled, up to the longest, while shares are good
_LONGEST_WINDOW: Final = 64
_WORTHWHILE: Final = 0.95  # shares change if the slowest worker would then need at most this part of its time


class Shares:
    """How the steps of one epoch are divided: speeds, and from which step on they hold."""

    def __init__(self, speeds: Sequence[float]) -> None:
        self._changes: list[tuple[int, tuple[float, ...]]] = [(0, tuple(speeds))]
        self._asked = -1
        self._known: dict[tuple[int, int], list[int]] = {}

    @property
    def since(self) -> int:
        """The step from which the newest shares hold."""
        return self._changes[-1][0]

    def change(self, step: int, speeds: Sequence[float]) -> None:
        """Divide by other speeds from a step on that nobody has asked for."""
        if step <= self._asked:
            raise RuntimeError(f"shares were to change from step {step} on, and step {self._asked} is divided already")
        self._changes.append((step, tuple(speeds)))

    def sizes(self, step: int, samples: int) -> list[int]:
        """How many samples of a step each worker has."""
        change = max(number for number, (since, _) in enumerate(self._changes) if since <= step)
        if (change, samples) not in self._known:
            self._known[change, samples] = divide(samples, self._changes[change][1])
        return self._known[change, samples]

    def bounds(self, step: int, samples: int, rank: int) -> tuple[int, int]:
        """Where a worker's part of a step's samples begins and ends."""
        self._asked = max(self._asked, step)
        sizes = self.sizes(step, samples)
        begin = sum(sizes[:rank])
        return begin, begin + sizes[rank]


class Balance:
    """Measures this worker and agrees with the others on everybody's share. One for each loader.

    `ahead`: how many batches the DataLoader asks for beyond the one in hand. `exchange`: gives this worker's number to
    all and returns everybody's, by rank; called at the same steps on all workers, in the thread that runs the loop.
    `told`: called with every worker's samples of a step when they change.
    """

    def __init__(
        self,
        workers: int,
        ahead: int,
        cursor: Cursor,
        exchange: Callable[[float], list[float]],
        told: Callable[[list[int]], None] | None = None,
    ) -> None:
        self._ahead, self._cursor, self._exchange, self._told = ahead, cursor, exchange, told
        self._agreed_ahead: int | None = None
        self._speeds = [1.0] * workers
        self._stretches: list[float] = []  # seconds for a sample, in each
        self._left_out = _WARM_UP
        self._window = _WINDOW
        self._mark()
        self._seconds, self._samples = 0.0, 0

    def newest(self) -> Shares:
        """The shares as they were last agreed."""
        return Shares(self._speeds)

    def begin(self) -> Shares:
        """The shares of an epoch that begins."""
        self._mark()
        self._seconds, self._samples = 0.0, 0
        return self.newest()

    def stepped(self, shares: Shares, step: int, samples: int, total: int, seconds: float) -> None:
        """A step has ended, `seconds` after it was asked for: waits included, `cursor` knows them."""
        waited, meetings = self._cursor.waited_seconds - self._waited, self._cursor.meetings - self._meetings
        self._mark()
        if step < shares.since or total < len(self._speeds):
            return  # divided by shares that no longer count, or too short to give everybody a sample
        self._seconds += max(seconds - waited, 1e-9)
        self._samples += samples
        if meetings:
            self._stretches.append(self._seconds / self._samples)
            self._seconds, self._samples = 0.0, 0
            if len(self._stretches) >= self._left_out + self._window:
                self._decide(shares, step, total)
                self._mark()

    def _decide(self, shares: Shares, step: int, total: int) -> None:
        if self._agreed_ahead is None:
            self._agreed_ahead = int(max(self._exchange(self._ahead)))
        speeds = self._exchange(1 / statistics.median(self._stretches[self._left_out :]))
        self._stretches, self._left_out = [], 0
        present, better = shares.sizes(step, total), divide(total, speeds)
        if slowest(better, speeds) > _WORTHWHILE * slowest(present, speeds):
            self._window = min(2 * self._window, _LONGEST_WINDOW)
            return
        self._speeds, self._window = speeds, _WINDOW
        # See [Note: shares of steps ahead]. An epoch that ends before gives the new shares to the next one.
        shares.change(step + self._agreed_ahead + 1, speeds)
        if self._told is not None:
            self._told(better)

    def _mark(self) -> None:
        self._waited, self._meetings = self._cursor.waited_seconds, self._cursor.meetings


def divide(samples: int, speeds: Sequence[float]) -> list[int]:
    """Whole parts of `samples` in proportion to speeds, each at least 1 where there are enough.

    >>> divide(16, [3.0, 1.0]), divide(10, [1.0, 1.0, 1.0, 1.0]), divide(5, [1000.0, 1.0]), divide(2, [1.0, 5.0, 1.0])
    ([12, 4], [3, 3, 2, 2], [4, 1], [1, 1, 0])
    """
    workers = len(speeds)
    if samples < workers or len(set(speeds)) == 1:
        bounds = [share_bounds(samples, workers, rank) for rank in range(workers)]
        return [end - begin for begin, end in bounds]
    spare, whole = samples - workers, sum(speeds)
    # What lies above 1 sample each: by largest remainder, lower ranks first where remainders are equal.
    wished = [max(samples * speed / whole - 1, 0.0) for speed in speeds]
    scale = spare / sum(wished) if sum(wished) else 0.0
    sizes = [1 + int(wish * scale) for wish in wished]
    order = sorted(range(workers), key=lambda rank: (sizes[rank] - 1 - wished[rank] * scale, rank))
    for number in range(samples - sum(sizes)):
        sizes[order[number % workers]] += 1
    return sizes


def slowest(sizes: Sequence[int], speeds: Sequence[float]) -> float:
    """How long a step takes the worker that needs longest."""
    return max(size / speed for size, speed in zip(sizes, speeds, strict=True))
