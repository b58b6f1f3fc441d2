"""The launcher's screen and log files: every line with the rank it came from, progress at the bottom."""

from __future__ import annotations

import codecs
import os
import sys
from pathlib import Path
from typing import BinaryIO, Literal

from argosy.observe.events import Event
from argosy.observe.folder import log_file
from argosy.observe.progress import progress_on

_COLOURS = (36, 33, 35, 32, 34, 91, 96, 93, 95, 92, 94)
_MAX_LINE = 64 * 1024

Source = Literal["stdout", "stderr"]


class Screen:
    """Where the lines of all ranks on this node meet."""

    def __init__(self) -> None:
        self._progress = progress_on(sys.stderr)
        self._plain = "NO_COLOR" in os.environ

    def line(self, rank: int, text: str, source: Source = "stdout") -> None:
        """A line that a rank has written. Of what a carriage return overwrote, only the last state is shown."""
        shown = text.rstrip("\r").rsplit("\r", 1)[-1]
        self._write(source, f"[{rank}]", _COLOURS[rank % len(_COLOURS)], shown)

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self._write("stderr", "argosy:", 1, text)

    def event(self, event: Event) -> None:
        """An event of the first rank, for the progress line."""
        self._progress.show(event)

    def close(self) -> None:
        """Take the progress line away."""
        self._progress.close()

    def _write(self, source: Source, prefix: str, colour: int, text: str) -> None:
        stream = sys.stdout if source == "stdout" else sys.stderr
        if stream.isatty() and not self._plain:
            prefix = f"\x1b[{colour}m{prefix}\x1b[0m"
        try:
            print(prefix, text, file=stream, flush=True)
        except BrokenPipeError:
            # Whoever read the output has gone (`| head`): training goes on, and the log files have everything.
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class RankLog:
    """What one rank writes: all of it into its log file, line by line onto the screen."""

    def __init__(self, screen: Screen, folder: Path, rank: int) -> None:
        self._screen, self._rank = screen, rank
        self._file: BinaryIO = log_file(folder, rank).open("ab", buffering=0)
        self._partial: dict[Source, str] = {"stdout": "", "stderr": ""}
        decoder = codecs.getincrementaldecoder("utf-8")  # bytes may come with half a character at their end
        self._decoders = {"stdout": decoder("replace"), "stderr": decoder("replace")}
        self.shown = True

    def data(self, source: Source, data: bytes) -> None:
        """Bytes as they came; a line is shown when it is complete, or too long to wait for its end."""
        self._file.write(data)
        *lines, rest = (self._partial[source] + self._decoders[source].decode(data)).split("\n")
        if len(rest) > _MAX_LINE:
            lines.append(rest)
            rest = ""
        self._partial[source] = rest
        for line in lines:
            self._show(source, line)

    def text(self, text: str) -> None:
        """Lines told through the channel, such as a traceback: shown even if the rank's output no longer is."""
        self._file.write(text.encode(errors="backslashreplace"))
        for line in text.rstrip("\n").split("\n"):
            self._screen.line(self._rank, line, "stderr")

    def record(self, text: str) -> None:
        """Lines for the log file only."""
        self._file.write(text.encode(errors="backslashreplace"))

    def close(self) -> None:
        """Show what has no end of line, and close the file."""
        for source, rest in self._partial.items():
            if rest:
                self._show(source, rest)
        self._partial = {"stdout": "", "stderr": ""}
        self._file.close()

    def _show(self, source: Source, line: str) -> None:
        if self.shown:
            self._screen.line(self._rank, line, source)
