"""Where tables live, as an embedding sees it: in this process, or on servers.

A training step pulls the rows that its batch needs, pushes their gradients, and ends with `done`. The rest, which pull
waits for which push, is the store's own business (`remote.py`). Ids are distinct here: `lookup.py` makes them so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from argosy._native import Table
from argosy.ps.spec import TableSpec


@dataclass(frozen=True)
class Gradients:
    """What a step has to say to a table: distinct ids, a gradient for each, how often each was there, and its clicks.

    `pulled` has the rows that the gradients were computed with, for a store that compensates delays.
    """

    ids: Tensor
    rows: Tensor
    shows: Tensor
    clicks: Tensor | None = None
    pulled: Tensor | None = None


class Store(ABC):
    """The tables of a job, by number."""

    compensates = False  # whether pushes want the rows that were pulled
    looks_ahead = False  # whether `start_pull` may be of use
    left_out = 0  # rows whose gradients this process itself did not apply, as they were not finite

    @abstractmethod
    def open(self, table: int, spec: TableSpec) -> None:
        """Make a table, unless it is there; all workers open the same ones."""

    @abstractmethod
    def pull(self, table: int, ids: Tensor) -> Tensor:
        """The rows of distinct ids."""

    def look(self, table: int, ids: Tensor) -> Tensor:
        """The rows as they are now, to evaluate a model with."""
        return self.pull(table, ids)

    def start_pull(self, table: int, ids: Tensor) -> Any:
        """Ask for the rows of the next step's ids; `finish_pull` gives them. None if that would save nothing."""
        return None

    def finish_pull(self, table: int, ids: Tensor, started: Any) -> Tensor:
        """The rows that were asked for."""
        raise NotImplementedError

    def forget_pull(self, started: Any) -> None:  # noqa: B027 - only a store that starts pulls has something to do
        """Nobody will take the rows that were asked for."""

    @abstractmethod
    def push(self, table: int, gradients: Gradients) -> None:
        """Hand gradients over. An error that concerns them may come with a later call."""

    @abstractmethod
    def done(self, weight: float) -> None:
        """All pushes of a step are made; its gradients are means over `weight` samples."""

    def settle(self) -> None:  # noqa: B027 - where pushes are applied at once, they are
        """Return when all that was pushed is applied."""

    @abstractmethod
    def end_day(self, table: int, decay: float) -> None:
        """Let counters of shows and clicks fade, and rows that were not pushed age by a day."""

    @abstractmethod
    def shrink(self, table: int, score_below: float, unseen_days: int, click_weight: float) -> int:
        """Remove rows that score low, or were not pushed for so many days; how many went."""

    @abstractmethod
    def rows(self, table: int) -> int:
        """How many ids have a row."""


class LocalStore(Store):
    """Tables in this process: a job of one worker, or an embedding that nobody has distributed.

    >>> from argosy.ps.rules import SGD
    >>> store = LocalStore()
    >>> store.open(0, TableSpec("words", dim=2, optimizer=SGD(lr=1.0), initializer="zeros"))
    >>> store.push(0, Gradients(torch.tensor([7]), torch.ones(1, 2), torch.ones(1, dtype=torch.int32)))
    >>> store.pull(0, torch.tensor([7, 8])).tolist()
    [[-1.0, -1.0], [0.0, 0.0]]
    """

    def __init__(self, *, rejects: bool = True) -> None:
        """`rejects`: a gradient that is not finite is an error; else it is left out and counted."""
        self._tables: dict[int, tuple[TableSpec, Table]] = {}
        self._step = 0
        self._rejects = rejects
        self.left_out = 0

    def open(self, table: int, spec: TableSpec) -> None:
        """Make a table."""
        if table not in self._tables:
            self._tables[table] = spec, Table(spec.config())

    def pull(self, table: int, ids: Tensor) -> Tensor:
        """The rows of distinct ids."""
        spec, native = self._tables[table]
        ids = ids.contiguous()
        rows = torch.empty(len(ids), spec.dim)
        native.pull(ids.data_ptr(), len(ids), rows.data_ptr())
        return rows

    def push(self, table: int, gradients: Gradients) -> None:
        """Apply gradients at once."""
        spec, native = self._tables[table]
        clicks = gradients.clicks
        told = native.push(
            gradients.ids.data_ptr(),
            len(gradients.ids),
            gradients.rows.data_ptr(),
            shows_at=gradients.shows.data_ptr(),
            clicks_at=clicks.data_ptr() if clicks is not None else 0,
            lr_factor=spec.factor(self._step),
            sequence=self._step,
        )
        if told["not_finite"] and self._rejects:
            raise FloatingPointError(
                f"{told['not_finite']} gradients of table {spec.name} are not finite; the rows stay as they were"
            )
        self.left_out += told["not_finite"]

    def set(self, table: int, ids: Tensor, rows: Tensor) -> None:
        """Let rows be these; what their optimizer remembers stays, also how often it has stepped."""
        ids, rows = ids.contiguous(), rows.contiguous()
        self._tables[table][1].set(ids.data_ptr(), len(ids), rows.data_ptr())

    def done(self, weight: float) -> None:
        """The next step begins."""
        self._step += 1

    def end_day(self, table: int, decay: float) -> None:
        """Let counters fade, and rows age."""
        self._tables[table][1].end_day(decay)

    def shrink(self, table: int, score_below: float, unseen_days: int, click_weight: float) -> int:
        """Remove rows that score low, or were not seen for long."""
        return self._tables[table][1].shrink(score_below, unseen_days, click_weight)

    def rows(self, table: int) -> int:
        """How many ids have a row."""
        return self._tables[table][1].rows
