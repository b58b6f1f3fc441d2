"""The launcher's screen and log files: every line with the rank it came from, progress at the bottom.

[Note: writing never waits]
A terminal may be stopped (Ctrl-S), a pipe unread (`| less`), a disk full. The launcher must still see its workers end
and its signals come, so a thread of its own writes to the screen, and lines that it cannot take any more are left out
there; they are in the log files. An error of writing is never the reason for which a run ends.
"""

from __future__ import annotations

import codecs
import os
import queue
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal

from argosy.observe.events import Event
from argosy.observe.folder import log_file
from argosy.observe.progress import progress_on

_COLOURS = (36, 33, 35, 32, 34, 91, 96, 93, 95, 92, 94)
_MAX_LINE = 64 * 1024
_MAX_WAITING = 10_000
_LAST_SECONDS = 2.0

Source = Literal["stdout", "stderr"]


class Screen:
    """Where the lines of all ranks on this node meet. See [Note: writing never waits]."""

    def __init__(self) -> None:
        self._progress = progress_on(sys.stderr)
        self._plain = "NO_COLOR" in os.environ
        self._waiting: queue.Queue[Callable[[], None]] = queue.Queue(_MAX_WAITING)
        self._left_out = 0
        threading.Thread(target=self._work, name="screen", daemon=True).start()

    def line(self, rank: int, text: str, source: Source = "stdout") -> None:
        """A line that a rank has written. Of what a carriage return overwrote, only the last state is shown."""
        shown = text.rstrip("\r").rsplit("\r", 1)[-1]
        self._later(lambda: self._write(source, f"[{rank}]", _COLOURS[rank % len(_COLOURS)], shown))

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self._later(lambda: self._write("stderr", "argosy:", 1, text))

    def event(self, event: Event) -> None:
        """An event of the first rank, for the progress line."""
        self._later(lambda: self._progress.show(event))

    def end_progress(self) -> None:
        """Take the progress line away."""
        self._later(self._progress.close)

    def close(self) -> None:
        """Take the progress line away, and wait until all lines are written, if somebody reads them."""
        self.end_progress()
        self.flush()

    def flush(self) -> None:
        """Wait until all that was said is on the screen, but not for ever."""
        written = threading.Event()
        with suppress(queue.Full):
            self._waiting.put(written.set, timeout=_LAST_SECONDS)
            written.wait(_LAST_SECONDS)

    def _later(self, write: Callable[[], None]) -> None:
        try:
            self._waiting.put_nowait(write)
        except queue.Full:
            self._left_out += 1

    def _work(self) -> None:
        while True:
            write = self._waiting.get()
            with suppress(OSError, ValueError):  # the terminal is gone, or was closed under the progress line
                write()
            if self._left_out and self._waiting.empty():
                left_out, self._left_out = self._left_out, 0
                self.say(f"{left_out} lines were not shown, because nobody read; the log files have them")

    def _write(self, source: Source, prefix: str, colour: int, text: str) -> None:
        stream = sys.stdout if source == "stdout" else sys.stderr
        if stream.isatty() and not self._plain:
            prefix = f"\x1b[{colour}m{prefix}\x1b[0m"
        try:
            encoding = stream.encoding or "utf-8"
            print(prefix, text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
        except BrokenPipeError:
            # Whoever read the output has gone (`| head`): training goes on, and the log files have everything.
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


class RankLog:
    """What one rank writes: line by line onto the screen, and all of it into its log file."""

    def __init__(self, screen: Screen, folder: Path, rank: int) -> None:
        self._screen, self._rank = screen, rank
        self._file: BinaryIO = log_file(folder, rank).open("ab", buffering=0)
        self._partial: dict[Source, str] = {"stdout": "", "stderr": ""}
        decoder = codecs.getincrementaldecoder("utf-8")  # bytes may come with half a character at their end
        self._decoders = {"stdout": decoder("replace"), "stderr": decoder("replace")}
        self._complained = False
        self.shown = True

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
            self._screen.line(self._rank, line, "stderr")
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
            self._screen.line(self._rank, line, source)

    def _keep(self, data: bytes) -> None:
        try:
            if not self._file.closed:
                self._file.write(data)
        except OSError as error:
            if not self._complained:
                self._complained = True
                self._screen.say(f"{self._file.name} cannot be written: {error}; the run goes on without it")
