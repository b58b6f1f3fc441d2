"""Python's warnings as events: they are shown as before, and kept."""

from __future__ import annotations

import warnings
from typing import TextIO

from argosy.observe.events import EventLog


class Warned:
    """Writes an event for each warning that is shown, from now until `close`."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._before, self._installed = warnings.showwarning, self._show
        warnings.showwarning = self._installed

    def close(self) -> None:
        """Show warnings as before, unless somebody else has changed that since."""
        if warnings.showwarning is self._installed:
            warnings.showwarning = self._before

    def _show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        self._log.emit("warning", message=str(message), category=category.__name__, file=filename, line=lineno)
        self._before(message, category, filename, lineno, file, line)
