"""How far a worker has come with the ranges that it holds, and when their queue is told.

Batches are done in the order in which they are handed out. One is trained when the script comes back for the next one,
or when its optimizer has stepped on it before the script breaks off; it is done when what that changed has been applied
as well (`settle`). The queue is told at the end of a range, when the script breaks off, and in between now and then: of
a worker that is killed, others train again what it had not told. Where what steps have changed travels while the next
ones are made (`Travelling`), nothing is waited for before the loop ends: the queue is told of what has been applied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from argosy.control.leases import Range
from argosy.data.cursor import Cursor

TELL_SECONDS: Final = 0.1
"""How often a queue is told inside a range, at most: beside so long, what the coordinator takes to answer is little."""


class Told(Protocol):
    """Who is told: `control.lease_client.LeaseClient`."""

    def done(self, name: str, done: Range) -> None:
        """A range is done, or its first batches are."""


class Travelling(Protocol):
    """How far what this worker's steps have changed has come."""

    @property
    def made(self) -> int:
        """Steps that were made."""

    @property
    def applied(self) -> int:
        """Steps, from the first one on, that servers have all of."""


class Progress:
    """One loop over a loader. `steps_sent` is how many steps are sent together: in between nothing is settled."""

    def __init__(
        self,
        queues: Told,
        queue: str,
        settle: Callable[[], None],
        steps_sent: int,
        cursor: Cursor,
        travelling: Travelling | None = None,
    ) -> None:
        self._queues, self._queue, self._settle, self._travelling = queues, queue, settle, travelling
        self._under_way: deque[tuple[Range, int]] = deque()  # what was trained, and after how many steps
        self._steps_sent, self._cursor = steps_sent, cursor
        self._in_hand: tuple[Range, bool] | None = None  # a batch's positions, and whether they end a range
        self._steps = 0  # that the script had made before it
        self._trained: Range | None = None  # of which the queue was not told
        self._batches = 0  # in it
        self._told = cursor.clock()

    def begin(self, batch: Range, *, ends: bool) -> None:
        """The script gets a batch; `ends` says that it is the last one of a range."""
        self._in_hand, self._steps = (batch, ends), self._cursor.steps

    def come_back(self) -> None:
        """The script asks for the next one."""
        ends = self._end_batch()
        is_time = self._cursor.clock() - self._told >= TELL_SECONDS and self._batches % self._steps_sent == 0
        if not (ends or is_time):
            return
        if self._travelling is None:
            self._tell()
        else:
            self._tell_what_is_applied(self._travelling)

    def pause(self) -> None:
        """There is nothing to train for now: wait until all is applied, and tell."""
        self._tell()

    def break_off(self) -> None:
        """The script does not come back."""
        if self._cursor.steps > self._steps:
            self._end_batch()
        self._in_hand = None
        self._tell()

    def _end_batch(self) -> bool:
        if self._in_hand is None:
            return False
        (batch, ends), self._in_hand = self._in_hand, None
        self._trained = Range(batch.begin if self._trained is None else self._trained.begin, batch.end)
        self._batches += 1
        return ends

    def _tell(self) -> None:
        trained = self._take()
        if trained is None and not self._under_way:
            return
        self._settle()  # if that fails the queue is never told: the range is trained again
        while self._under_way:
            self._queues.done(self._queue, self._under_way.popleft()[0])
        if trained is not None:
            self._queues.done(self._queue, trained)
        self._told = self._cursor.clock()

    def _tell_what_is_applied(self, travelling: Travelling) -> None:
        trained = self._take()
        if trained is not None:
            self._under_way.append((trained, travelling.made))
        while self._under_way and self._under_way[0][1] <= travelling.applied:
            self._queues.done(self._queue, self._under_way.popleft()[0])
        self._told = self._cursor.clock()

    def _take(self) -> Range | None:
        trained, self._trained, self._batches = self._trained, None, 0
        return trained
