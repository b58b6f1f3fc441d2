"""The launcher's screen and log files: every line with the rank it came from, progress at the bottom.

[Note: writing never waits]
A terminal may be stopped (Ctrl-S), a pipe unread (`| less`), a disk full. The launcher must still see its workers end
and its signals come, so each stream has a thread that writes to it. When many lines are waiting, the workers' output
is not read for a while (`Screen.crowded`): they wait then, as anyone who writes into a full pipe does, and nothing is
lost. An error of writing is never the reason for which a run ends.
"""

from __future__ import annotations

import codecs
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Literal

from argosy.observe.events import Event
from argosy.observe.folder import Role, log_file
from argosy.observe.progress import progress_on

_COLOURS = (36, 33, 35, 32, 34, 91, 96, 93, 95, 92, 94)
_MAX_LINE = 64 * 1024
_CROWDED = 5_000

Source = Literal["stdout", "stderr"]


class Writer:
    """A thread that writes to one stream. Lines that wait are written together."""

    def __init__(self, name: Source) -> None:
        self._name = name
        self._waiting: deque[str | Callable[[], None]] = deque()
        self._news = threading.Condition()
        threading.Thread(target=self._work, name=f"screen-{name}", daemon=True).start()

    def post(self, item: str | Callable[[], None]) -> None:
        """A line to write, or something to do when the lines before it are written."""
        with self._news:
            self._waiting.append(item)
            self._news.notify()

    def __len__(self) -> int:
        return len(self._waiting)

    def flush(self, timeout_seconds: float | None) -> None:
        """Wait until all that was posted is written; not longer than that, if a time is given."""
        written = threading.Event()
        self.post(written.set)
        written.wait(timeout_seconds)

    def _work(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._waiting)
                items = [self._waiting.popleft() for _ in range(min(len(self._waiting), 500))]
            lines: list[str] = []
            for item in items:
                if isinstance(item, str):
                    lines.append(item)
                    continue
                self._write(lines)
                lines = []
                try:
                    item()
                except Exception as error:  # whatever it is: a writer that ends would leave all that follows unsaid
                    lines = [f"argosy: the progress could not be shown: {error!r}"]
            self._write(lines)

    def _write(self, lines: list[str]) -> None:
        if not lines:
            return
        stream = sys.stdout if self._name == "stdout" else sys.stderr
        encoding = stream.encoding or "utf-8"
        text = "".join(line + "\n" for line in lines)
        try:
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            stream.flush()
        except BrokenPipeError:
            # Whoever read the output has gone (`| head`): training goes on, and the log files have everything.
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
        except (OSError, ValueError):
            return  # the terminal is gone


class Screen:
    """Where the lines of all ranks on this node meet. See [Note: writing never waits]."""

    def __init__(self) -> None:
        self._progress = progress_on(sys.stderr)
        self._plain = "NO_COLOR" in os.environ
        self._writers: dict[Source, Writer] = {"stdout": Writer("stdout"), "stderr": Writer("stderr")}

    @property
    def crowded(self) -> bool:
        """Whether so many lines are waiting that no more should be taken from the workers."""
        return any(len(writer) > _CROWDED for writer in self._writers.values())

    def line(self, number: int, text: str, source: Source = "stdout", role: Role = "rank") -> None:
        """A line that a rank or a server has written. Of what a carriage return overwrote, the last state is shown."""
        shown = text.rstrip("\r").rsplit("\r", 1)[-1]
        prefix = f"[{number}]" if role == "rank" else f"[{role} {number}]"
        self._post(source, prefix, _COLOURS[number % len(_COLOURS)], shown)

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self._post("stderr", "argosy:", 1, text)

    def event(self, event: Event) -> None:
        """An event of the first rank, for the progress line."""
        self._writers["stderr"].post(lambda: self._progress.show(event))

    def end_progress(self) -> None:
        """Take the progress line away."""
        self._writers["stderr"].post(self._progress.close)

    def close(self, timeout_seconds: float | None = None) -> None:
        """Take the progress line away, and wait until all lines are written, for as long as the reader needs."""
        self.end_progress()
        for writer in self._writers.values():
            writer.flush(timeout_seconds)

    def _post(self, source: Source, prefix: str, colour: int, text: str) -> None:
        stream = sys.stdout if source == "stdout" else sys.stderr
        if stream.isatty() and not self._plain:
            prefix = f"\x1b[{colour}m{prefix}\x1b[0m"
        self._writers[source].post(f"{prefix} {text}")


class RankLog:
    """What one rank, or one server, writes: line by line onto the screen, and all of it into its log file."""

    def __init__(self, screen: Screen, folder: Path, rank: int, role: Role = "rank") -> None:
        self._screen, self._rank, self._role = screen, rank, role
        self._file: BinaryIO = log_file(folder, rank, role).open("ab", buffering=0)
        self._partial: dict[Source, str] = {"stdout": "", "stderr": ""}
        decoder = codecs.getincrementaldecoder("utf-8")  # bytes may come with half a character at their end
        self._decoders = {"stdout": decoder("replace"), "stderr": decoder("replace")}
        self._complained = False
        self.shown = True

    @property
    def crowded(self) -> bool:
        """Whether the screen cannot take more lines now."""
        return self.shown and self._screen.crowded

    def data(self, source: Source, data: bytes) -> None:
        """Bytes as they came; a line is shown when it is complete, or too long to wait for its end."""
        *lines, rest = (self._partial[source] + self._decoders[source].decode(data)).split("\n")
        if len(rest) > _MAX_LINE:
            lines.append(rest)
            rest = ""
        self._partial[source] = rest
        for line in lines:
            self._show(source, line)
        self._keep(data)

    def text(self, text: str) -> None:
        """Lines told through the channel, such as a traceback: shown even if the rank's output no longer is."""
        for line in text.rstrip("\n").split("\n"):
            self._screen.line(self._rank, line, "stderr", self._role)
        self.record(text)

    def record(self, text: str) -> None:
        """Lines for the log file only."""
        self._keep(text.encode(errors="backslashreplace"))

    def close(self) -> None:
        """Show what has no end of line, and close the file. Calling it twice is harmless."""
        for source, rest in self._partial.items():
            if rest:
                self._show(source, rest)
        self._partial = {"stdout": "", "stderr": ""}
        self._file.close()

    def _show(self, source: Source, line: str) -> None:
        if self.shown:
            self._screen.line(self._rank, line, source, self._role)

    def _keep(self, data: bytes) -> None:
        try:
            if not self._file.closed:
                self._file.write(data)
        except OSError as error:
            if not self._complained:
                self._complained = True
                self._screen.say(f"{self._file.name} cannot be written: {error}; the run goes on without it")
