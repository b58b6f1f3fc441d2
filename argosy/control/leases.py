"""Queues of samples that the coordinator keeps: workers take ranges of positions, and say when they are done.

A queue is one epoch of one loader. It hands out its positions in order, in ranges of whole batches, shorter ones near
the end, so that workers finish together. A range belongs to the connection that took it, which says that it is done at
once or batch by batch; when that ends, the rest returns to the queue and is the next one to be handed out. Whoever
finds nothing left waits, as long as others hold ranges: one of them may be lost. A queue is finished when every
position is done; of that it is known for good (`past`), and its ledger is kept for a while.

Plain data and no input or output, like `table` and `barriers`; it lives in the coordinator's event loop.

[Note: exactly once] Ranges are cut one after another, a range is held by one holder at a time, and only its holder can
say that it is done; so no position is done twice. The ledger does not rely on that: it counts how often each position
was said to be done, whatever the queue believes, and so checks it.
"""

from __future__ import annotations

import asyncio
import bisect
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from argosy.control.past import Past

MAX_QUEUES: Final = 16_384
"""Queues that may be unfinished at a time."""
LEDGERS_KEPT: Final = 256
"""Of so many finished queues, the last ones, the ledger can be asked for."""
MAX_HELD: Final = 64
"""Ranges that one connection may hold at a time."""
_NAMES_SHOWN: Final = 8


class LeaseError(Exception):
    """A request that a queue refuses; it changed nothing. `kind` is what the client sees."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Range(NamedTuple):
    """Positions from `begin` to before `end`."""

    begin: int
    end: int


class Shape(NamedTuple):
    """What a queue is of: positions, those of one batch, the most in one range, and how many workers are expected."""

    samples: int
    batch: int
    largest: int
    workers: int


class Holder:
    """A connection that takes ranges. `who` names it in the errors of others."""

    def __init__(self) -> None:
        self.who = "somebody"
        self.held: dict[tuple[str, int], Range] = {}


class Ledger:
    """How often each position was done, kept as runs of positions of the same count.

    >>> ledger = Ledger(10)
    >>> ledger.add(Range(0, 4)); ledger.add(Range(4, 8)); ledger.add(Range(6, 8))
    >>> ledger.counts()
    [(0, 6, 1), (6, 8, 2), (8, 10, 0)]
    """

    def __init__(self, samples: int) -> None:
        # `_times[i]` holds from `_begins[i]` to before `_begins[i + 1]`; the last begin is the end of all.
        self._begins = [0, samples] if samples else [0]
        self._times = [0] if samples else []

    def add(self, done: Range) -> None:
        """Count a range once more."""
        first, last = self._cut(done.begin), self._cut(done.end)
        for place in range(first, last):
            self._times[place] += 1
        for place in range(min(last, len(self._times) - 1), max(first - 1, 0), -1):
            if self._times[place] == self._times[place - 1]:
                del self._times[place], self._begins[place]

    def counts(self) -> list[tuple[int, int, int]]:
        """Runs of positions and how often they were done."""
        return list(zip(self._begins, self._begins[1:], self._times, strict=False))

    def _cut(self, position: int) -> int:
        """The place of the run that begins at a position, made if there is none."""
        place = bisect.bisect_left(self._begins, position)
        if self._begins[place] != position:
            self._begins.insert(place, position)
            self._times.insert(place, self._times[place - 1])
        return place


@dataclass
class _Queue:
    shape: Shape
    ledger: Ledger
    next: int = 0
    left: int = 0  # positions that are not done
    taken: int = 0
    came_back: int = 0
    returned: list[Range] = field(default_factory=list)
    out: dict[int, Holder] = field(default_factory=dict)  # by where a range begins
    waiting: list[asyncio.Future[None]] = field(default_factory=list)

    def cut(self) -> Range | None:
        """The next range to hand out; None if there is none now."""
        if self.returned:
            return self.returned.pop()
        if self.next >= self.shape.samples:
            return None
        samples, batch, largest, workers = self.shape
        # Half of an equal part of what remains: the last ranges are single batches.
        fair = (samples - self.next) // (2 * workers)
        size = max(min(fair, largest) // batch, 1) * batch
        begin, self.next = self.next, min(self.next + size, samples)
        return Range(begin, self.next)

    def wake(self) -> None:
        """Those who wait have a reason to look again."""
        for future in self.waiting:
            if not future.done():
                future.set_result(None)
        self.waiting.clear()


class Leases:
    """All queues of a job.

    >>> async def example() -> list[Range | None]:
    ...     leases, holder = Leases(), Holder()
    ...     leases.open("epoch 0", Shape(samples=10, batch=4, largest=8, workers=1))
    ...     taken = []
    ...     while (range := leases.take("epoch 0", holder)) is not None:
    ...         leases.done("epoch 0", range, holder)
    ...         taken.append(range)
    ...     return taken
    >>> asyncio.run(example())
    [Range(begin=0, end=4), Range(begin=4, end=8), Range(begin=8, end=10)]
    """

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}  # not finished
        self._past = Past()
        self._ledgers: dict[str, dict[str, object]] = {}  # of finished queues, the last one last

    def open(self, name: str, shape: Shape) -> None:
        """Make a queue. All workers do, and all but the first find it there; they must want the same."""
        if name in self._past:
            return
        queue = self._queues.get(name)
        if queue is not None:
            if queue.shape != shape:
                told = f"queue {name!r} has {queue.shape._asdict()}, and this worker wants {shape._asdict()}"
                raise LeaseError("lease-mismatch", f"{told}: workers must read the same data in the same way")
            return
        if len(self._queues) + len(self._past) >= MAX_QUEUES:
            raise LeaseError("full", f"the coordinator holds {MAX_QUEUES} queues of samples, its limit")
        self._queues[name] = _Queue(shape, Ledger(shape.samples), left=shape.samples)
        if not shape.samples:
            self._finish(name)

    def take(self, name: str, holder: Holder) -> Range | None:
        """Hand out a range; None if all are done, or none is free now (see `finished`)."""
        if name in self._past:
            return None
        queue = self._queue(name)
        if len(holder.held) >= MAX_HELD:
            raise LeaseError("full", f"{holder.who} holds {MAX_HELD} ranges of samples, the most that it may")
        taken = queue.cut()
        if taken is not None:
            queue.taken += 1
            queue.out[taken.begin] = holder
            holder.held[name, taken.begin] = taken
        return taken

    def finished(self, name: str) -> bool:
        """Whether every position is done."""
        return name in self._past or self._queue(name).left == 0

    def change(self, name: str) -> asyncio.Future[None]:
        """Settled when a range has returned, or the last one is done; given back with `give_up` if not awaited."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue(name).waiting.append(future)
        return future

    def give_up(self, name: str, future: asyncio.Future[None]) -> None:
        """Forget a wait."""
        queue = self._queues.get(name)
        if queue is not None and future in queue.waiting:
            queue.waiting.remove(future)

    def done(self, name: str, done: Range, holder: Holder) -> None:
        """A range is done, or its first batches are; the rest stays held. Only who holds it can say so."""
        begin, end = done
        held = holder.held.get((name, begin))
        if held is None or not self._begins_with(name, held, end):
            told = f"this connection does not hold the positions of {name!r} from {begin} to {end}"
            raise LeaseError("not-held", f"{told}, or they are no whole batches that a range begins with")
        queue = self._queue(name)
        del holder.held[name, begin], queue.out[begin]
        if end < held.end:
            holder.held[name, end], queue.out[end] = Range(end, held.end), holder
        queue.ledger.add(done)
        queue.left -= end - begin
        if queue.left == 0:
            self._finish(name)

    def give_back(self, holder: Holder, only: str | None = None) -> None:
        """What a holder has returns, of one queue or of all: it has broken off, or gone."""
        for name, begin in [key for key in holder.held if only in (None, key[0])]:
            queue = self._queue(name)
            del queue.out[begin]
            queue.returned.append(holder.held.pop((name, begin)))
            queue.came_back += 1
            queue.wake()

    def summary(self, name: str) -> dict[str, object]:
        """The ledger of a queue: how often each position was done, and how many ranges were taken and came back."""
        if name in self._past:
            if name not in self._ledgers:
                told = f"the ledger of {name!r} is not kept any more, only those of the {LEDGERS_KEPT} queues that"
                raise LeaseError("no-queue", f"{told} were finished last")
            return self._ledgers[name]
        queue = self._queue(name)
        return {
            "samples": queue.shape.samples,
            "counts": queue.ledger.counts(),
            "taken": queue.taken,
            "returned": queue.came_back,
            "finished": queue.left == 0,
        }

    def describe(self, name: str) -> str:
        """Who holds what others wait for."""
        holders = sorted({holder.who for holder in self._queue(name).out.values()})
        more = f" and {len(holders) - _NAMES_SHOWN} more" if len(holders) > _NAMES_SHOWN else ""
        return f"ranges are held by {', '.join(holders[:_NAMES_SHOWN])}{more}"

    def _finish(self, name: str) -> None:
        self._ledgers[name] = self.summary(name)
        while len(self._ledgers) > LEDGERS_KEPT:
            del self._ledgers[next(iter(self._ledgers))]
        self._past.add(name)
        self._queues.pop(name).wake()

    def _begins_with(self, name: str, held: Range, end: int) -> bool:
        """Whether what is before `end` is the whole of a range, or the first batches of it."""
        return end == held.end or (held.begin < end < held.end and end % self._queue(name).shape.batch == 0)

    def _queue(self, name: str) -> _Queue:
        queue = self._queues.get(name)
        if queue is None:
            raise LeaseError("no-queue", f"there is no queue of samples named {name!r}; open it first")
        return queue
