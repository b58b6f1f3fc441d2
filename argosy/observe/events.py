"""Events: what happened on a rank, one JSON object per line, in the run's folder.

`start`, `step`, `warning`, `end` and whatever else a part has to tell. A line is written with one system call when
the event happens, so a killed worker's file holds everything up to its last moment.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class EventLog:
    """Appends one rank's events to a file, and passes them on to whoever listens.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "rank0.events.jsonl"
    >>> log = EventLog(file, rank=0, clock=lambda: 12.5)
    >>> log.emit("step", loss=0.25)
    >>> file.read_text()
    '{"time": 12.5, "event": "step", "rank": 0, "loss": 0.25}\\n'
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        listener: Callable[[Event], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._rank, self._listener, self._clock = rank, listener, clock
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def emit(self, event: str, **fields: Any) -> None:
        """Tell what happened. After `close` it is told to nobody."""
        if self._file is None:
            return
        record = {"time": round(self._clock(), 6), "event": event, "rank": self._rank}
        record |= {name: _finite(value) for name, value in fields.items()}
        try:
            os.write(self._file, (json.dumps(record) + "\n").encode())
        except OSError as error:
            self.close()  # a full disk is no reason to stop training
            print(f"argosy: events are no longer written: {error}", file=sys.stderr)
        if self._listener is not None:
            self._listener(record)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def record_end(path: Path, rank: int, status: str) -> None:
    """Write the `end` that a worker could not write itself, if it had begun to write events."""
    with suppress(OSError, IndexError):
        last = path.read_bytes().splitlines()[-1]
        if b'"event": "end"' not in last:
            log = EventLog(path, rank)
            log.emit("end", status=status)
            log.close()


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they are written as text."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
