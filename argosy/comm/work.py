"""The two kinds of `Work` that the torch backend returns: ended before it was returned, or still under way.

torch hands a `Work` to whoever asked for an operation: `wait()` ends it, `get_future()` is what DDP chains its
gradient hooks to.

[Note: futures and threads]
A started operation runs when somebody waits for it, in the thread that waits, or else on the engine's own thread. A
future cannot run anything: whoever waits for it sleeps until it is completed. So `get_future` has a thread wait, one
for each group, made when it is first needed: it runs the operations one after the other, as the engine would, and
completes their futures.

Running the operation inside `get_future` instead would spare the hand-over between threads, some 60 microseconds. With
two ranks on two cores a step of DDP took the same time either way. But where the reduction waits for a network, the
backward pass, in the middle of which DDP asks for its futures, would wait too; and ranks that ask for those of two
groups in different orders would wait for each other for ever.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Final

from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

from argosy.comm.pending import Pending


class EndedWork(Work):
    """An operation that ended before its function returned. Torch waits for it, and forgets it."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True

    def is_success(self) -> bool:
        """A failed operation raises where it is called, and has no `Work`."""
        return True

    def exception(self) -> None:
        """See `is_success`."""

    def synchronize(self) -> None:
        """CPU tensors have no stream to wait for."""

    def result(self) -> list[Tensor]:
        """The caller has the tensors: who asks for them later starts the operation asynchronously."""
        return []

    def get_future(self) -> Future[list[Tensor]]:
        """A future that is completed already, likewise."""
        future: Future[list[Tensor]] = Future()
        future.set_result([])
        return future


ENDED: Final = EndedWork()  # one for all: to make another takes as long as half a small operation


class StartedWork(Work):
    """An operation under way."""

    def __init__(
        self,
        pending: Pending,
        tensors: list[Tensor],
        watcher: Watcher,
        timeout_seconds: float | None,
        finish: Callable[[], None] | None,
    ) -> None:
        """`finish` runs once, when the operation has ended: it copies what was received to where it belongs."""
        super().__init__()
        self._pending = pending
        self._tensors = tensors
        self._watcher = watcher
        self._timeout_seconds = timeout_seconds
        self._finish = finish
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._future: Future[list[Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """End the operation. Without a timeout (torch's C++ says 0) it has that of its call or of the group."""
        try:
            self._pending.wait(timeout.total_seconds() if timeout else self._timeout_seconds)
        except Exception as error:
            self._error = error
            raise
        if self._finish is not None:
            with self._lock:  # the watcher may be waiting too
                if self._finish is not None:
                    self._finish()
                    self._finish = None
        return True

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or not."""
        if self._pending.done() and self._error is None:
            try:
                self.wait()
            except Exception:
                return True
        return self._pending.done()

    def is_success(self) -> bool:
        """Whether it has ended well."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Why it failed."""
        return self._error

    def synchronize(self) -> None:
        """What torch calls in place of `wait` after polling."""
        self.wait()

    def result(self) -> list[Tensor]:
        """The tensors that hold the result, once it is there."""
        return self._tensors

    def _source_rank(self) -> int:
        """Who sent what was received from anybody."""
        source: int = getattr(self._pending, "source", -1)
        return source

    source_rank = _source_rank

    def get_future(self) -> Future[list[Tensor]]:
        """Completed when the operation has ended; see [Note: futures and threads]."""
        if self._watcher.is_current():
            # A callback of another future asks for this one and may wait for it, on the very thread that would
            # complete it. So the operation is done here.
            with contextlib.suppress(Exception):
                self.wait()
        with self._lock:
            if self._future is None and self._watcher.is_current():
                self._future = self._ended()
            if self._future is None:
                started: Future[list[Tensor]] = Future()
                # An exception that is set on a future of Python's is a value to C++, on which DDP crashes. Raised
                # inside `then` it is a failure to both.
                self._future = started.then(lambda ended: ended.value())
                self._watcher.watch(self, started)
            return self._future

    def _ended(self) -> Future[list[Tensor]]:
        """A future of an operation that is over."""
        ended: Future[list[Tensor]] = Future()
        if self._error is None:
            ended.set_result(self._tensors)
        else:
            ended.set_exception(self._error)  # type: ignore[arg-type]
        return ended.then(lambda future: future.value())


class Watcher:
    """A thread that waits for operations, in their order, and completes their futures."""

    def __init__(self, name: str) -> None:
        """The thread is started by the first `watch`."""
        self._name = name
        self._queue: SimpleQueue[tuple[StartedWork, Future[list[Tensor]]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, work: StartedWork, future: Future[list[Tensor]]) -> None:
        """Complete `future` when `work` has ended."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put((work, future))

    def is_current(self) -> bool:
        """Whether this is called on the watching thread, by a callback of a future."""
        return threading.current_thread() is self._thread

    def close(self, patience_seconds: float | None = None) -> None:
        """Wait for what is watched, and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            if not self.is_current():
                self._thread.join(patience_seconds)

    def _run(self) -> None:
        while (watched := self._queue.get()) is not None:
            work, future = watched
            try:
                work.wait()
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(work.result())
            del work, future, watched  # lest their tensors live until the next operation


class _Several(Pending):
    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = parts

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait for each."""
        for part in self._parts:
            part.wait(timeout_seconds)

    def done(self) -> bool:
        """Whether all have ended."""
        return all(part.done() for part in self._parts)


def as_one(parts: Sequence[Pending]) -> Pending:
    """Several started operations as one."""
    return parts[0] if len(parts) == 1 else _Several(parts)
