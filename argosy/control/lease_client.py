"""A worker's side of the coordinator's queues of samples (`leases`).

All calls go over one connection that is held open: what was taken over it and is not done returns to the queue when it
ends, however the process ends.
"""

from __future__ import annotations

from argosy.control.client import Client, CoordinatorLost, DeadlineExceeded
from argosy.control.leases import Range
from argosy.control.wire import Message


class LeaseClient:
    """Takes ranges of positions from queues of the coordinator, and says when they are done."""

    def __init__(self, client: Client) -> None:
        self._line, self._who = client.line(), client.who

    def open(self, name: str, *, samples: int, batch: int, largest: int, workers: int) -> None:
        """Make a queue of `samples` positions, unless another worker has; all must want the same.

        Ranges are whole batches, of `largest` positions at most; near the end they become shorter, as is fair among
        `workers`.
        """
        request = {"op": "lease_open", "name": name, "samples": samples, "batch": batch}
        self._line.call({**request, "largest": largest, "workers": workers})

    def take(self, name: str, timeout_seconds: float | None = None) -> Range | None:
        """The next range. Waits while others hold all that is left; None when every position is done."""
        return _range(self._line.call({"op": "lease_take", "name": name, "who": self._who}, timeout_seconds))

    def take_now(self, name: str) -> Range | None:
        """The next range; None if there is none now."""
        try:
            return self.take(name, 0.0)
        except DeadlineExceeded:
            return None

    def done(self, name: str, done: Range) -> None:
        """A range that was taken is done: its samples are trained on, and what that changed has been applied.

        It may be said of its first batches, then of the next ones: of a worker that is lost only the rest returns.
        """
        self._line.call({"op": "lease_done", "name": name, "begin": done.begin, "end": done.end})

    def give_back(self, name: str) -> None:
        """Return to a queue what was taken from it and is not done, for others."""
        self._line.call({"op": "lease_give_back", "name": name})

    def ledger(self, name: str) -> Message:
        """What the coordinator has counted: `counts` has [begin, end, how often] for runs of positions."""
        return self._line.call({"op": "lease_ledger", "name": name})

    def close(self) -> None:
        """End the connection; ranges that are not done return to their queues."""
        self._line.close()


def _range(reply: Message) -> Range | None:
    value = reply.get("range")
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(each, int) for each in value):
        raise CoordinatorLost("the coordinator's reply has no range")
    return Range(*value)
