"""The channel from a worker to its launcher: events for the screen, and the account of a failure.

One end of a socket pair that keeps message boundaries. Events are dropped rather than waited for when the launcher
does not read: showing progress never slows training. A failure is worth a short wait.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

from argosy.observe.events import Event

MAX_MESSAGE_BYTES = 128 * 1024


class Channel:
    """The worker's end. `rate` caps the `step` events passed on each second; other events always pass."""

    def __init__(self, end: socket.socket, clock: Callable[[], float], rate: float = 10.0) -> None:
        self._end, self._clock, self._interval = end, clock, 1.0 / rate
        self._next = 0.0

    def event(self, event: Event) -> None:
        """Pass an event on, if it can be done at once."""
        now = self._clock()
        if event["event"] == "step" and event.get("batch", 0) + 1 != event.get("batches"):
            if now < self._next:
                return
            self._next = now + self._interval
        self._send(event, timeout_seconds=0.0)

    def failure(self, message: str, traceback: str, status: int, secondary: bool = False) -> None:
        """Tell the launcher why this worker ends, and with what status; too long a traceback loses its beginning.

        `secondary` says that the error is only the echo of another worker's.
        """
        kept = traceback[-MAX_MESSAGE_BYTES // 4 :]
        while len(json.dumps(kept)) > MAX_MESSAGE_BYTES // 2:  # a character takes up to 12 bytes there
            kept = kept[len(kept) // 2 :]
        if len(kept) < len(traceback):
            kept = "... (the beginning was cut)\n" + kept
        account = {"message": message[:1000], "traceback": kept, "status": status & 0xFF or 1, "secondary": secondary}
        event = {"event": "failure", **account}
        self._send(event, timeout_seconds=1.0)

    def _send(self, event: Event, timeout_seconds: float) -> None:
        self._end.settimeout(timeout_seconds)
        try:
            self._end.send(json.dumps(event).encode())
        except OSError:
            return  # the launcher is busy or gone: the event is in the file, and the guard ends this process


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends: the launcher's and the worker's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
