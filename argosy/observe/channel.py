"""The channel from a worker to its launcher: events for the screen, and the account of a failure.

One end of a socket pair that keeps message boundaries. Events are dropped rather than waited for when the launcher
does not read: showing progress never slows training. A failure is worth a short wait.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack

from argosy.observe.events import Event

MAX_MESSAGE_BYTES = 128 * 1024
_PIECE = MAX_MESSAGE_BYTES // 16  # characters of a traceback in a message: in JSON one may take 12 bytes


class Channel:
    """The worker's end. `rate` caps the `step` events passed on each second; other events always pass."""

    def __init__(self, end: socket.socket, clock: Callable[[], float], rate: float = 10.0) -> None:
        self._end, self._clock, self._interval = end, clock, 1.0 / rate
        self._next = 0.0

    @classmethod
    def at(cls, fd: int, leaving: ExitStack) -> Channel:
        """The channel whose worker's end is a descriptor of this process; it keeps a copy of its own until the end."""
        return cls(leaving.enter_context(socket.socket(fileno=os.dup(fd))), time.monotonic)

    def event(self, event: Event) -> None:
        """Pass an event on, if it can be done at once."""
        now = self._clock()
        if event["event"] == "step" and event.get("batch", 0) + 1 != event.get("batches"):
            if now < self._next:
                return
            self._next = now + self._interval
        self._send(event, timeout_seconds=0.0)

    def failure(self, message: str, traceback: str, status: int, secondary: bool = False) -> bool:
        """Tell the launcher why this worker ends, and with what status.

        `secondary` says that the error is only the echo of another worker's. Returns whether it could be told.
        """
        pieces = [traceback[begin : begin + _PIECE] for begin in range(0, len(traceback), _PIECE)]
        account = {"message": message[:1000], "status": status & 0xFF or 1, "secondary": secondary}
        events: list[Event] = [{"event": "traceback", "text": piece} for piece in pieces]
        return all(self._send(event, timeout_seconds=1.0) for event in [*events, {"event": "failure", **account}])

    def _send(self, event: Event, timeout_seconds: float) -> bool:
        self._end.settimeout(timeout_seconds)
        try:
            self._end.send(json.dumps(event).encode())
        except OSError:
            return False  # the launcher is busy or gone: the event is in the file, and the guard ends this process
        return True


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends: the launcher's and the worker's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
