"""Training far from the servers: every worker steps on rows of its own, and tells what has become of them now and then.

A row is fetched when the worker first needs it. From then on it is the worker's, with an optimizer of its own, and
every k steps the difference since the last time is added to the servers' row, which then comes back with what others
have added. On a slow link that is the rows of k steps once, and not those of each step.

Nobody waits for that. What k steps have changed travels while the next k are made, a part of it in each step: out in
one, asked for in the next, in with the one after that; what was learnt since a row went out is added to what comes in.

What all workers change, the dense parameters, is averaged (`dense.py`): each has gone the way that the gradients show,
and the sum would go it several times. What one alone has changed is added as it is. A row is in between: some are in
every batch, most in few. So its difference is divided by the number of workers that will have changed it in as many
steps, as far as this one can tell from how often it has met the row itself.

Which ids get a row, servers say when workers meet: one that has to wait begins anew, as it does in other modes.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from argosy._native import Table
from argosy.ps.dense import AveragedParameters
from argosy.ps.lookup import Lookup
from argosy.ps.merge import counted
from argosy.ps.remote import RemoteStore
from argosy.ps.spec import TableSpec
from argosy.ps.store import Gradients, LocalStore, Store


class GeoStore(Store):
    """Rows in this process that meet the servers' every `steps` steps, as those of `workers` processes do."""

    def __init__(self, remote: RemoteStore, steps: int, workers: int, *, rejects: bool = True) -> None:
        self._remote, self._steps, self._workers = remote, steps, workers
        self._local = LocalStore(rejects=rejects)
        self._bases: dict[int, _Bases] = {}
        self._pushed: dict[int, list[Gradients]] = {}  # since the last division, without their rows
        self._parts: deque[list[Part]] = deque()  # what was divided, and has not gone out yet
        self._out: list[Part] = []  # what has
        self._coming: list[Part] = []  # what was asked for
        self.made = 0  # steps
        self._divided = 0  # those that were made before the last division
        self.applied = 0  # those that the servers have all of
        self.dense: AveragedParameters | None = None  # what meets the servers', too

    def open(self, table: int, spec: TableSpec) -> None:
        """Make a table here, and one of plain sums on the servers."""
        self._local.open(table, dataclasses.replace(spec, entry="always"))
        self._remote.open(table, dataclasses.replace(spec, optimizer=None))
        self._bases[table] = _Bases(spec.dim)

    def pull(self, table: int, ids: Tensor) -> Tensor:
        """This worker's rows; those it has not had yet come from the servers."""
        known = self._bases[table].known(ids)
        if not bool(known.all()):
            self._fetch(table, ids[~known])
        return self._local.pull(table, ids)

    def look(self, table: int, ids: Tensor) -> Tensor:
        """The servers' rows, which have what all workers have learnt; what this one has, too."""
        self.settle()
        return self._remote.look(table, ids)

    def push(self, table: int, gradients: Gradients) -> None:
        """Step on this worker's rows."""
        self._local.push(table, gradients)
        self.left_out = self._local.left_out
        self._pushed.setdefault(table, []).append(dataclasses.replace(gradients, rows=torch.empty(0), pulled=None))

    def done(self, weight: float) -> None:
        """End a step, between which and the next one a part travels."""
        self._local.done(weight)
        self.made += 1
        self._go_on()
        if self.made % self._steps == 0:
            self._divide()

    def settle(self) -> None:
        """Leave nothing that the servers do not know, and take what they have."""
        if self.made > self._divided:
            self._divide()
        self._arrive()
        self._remote.settle()

    def _divide(self) -> None:
        """The steps since the last time are to travel; those before have."""
        self._arrive()
        pushed, self._pushed = self._pushed, {}
        self._divided = self.made
        parts: list[list[Part]] = [[] for _ in range(self._steps)]
        for table, several in pushed.items():
            lookup = Lookup.of(torch.cat([each.ids for each in several]))
            sharing = self._sharing(self._bases[table].count(lookup.ids, steps=lookup.shows))
            shows, clicks = counted(several, lookup)
            stores = self._local, self._remote, self._bases[table]
            for part, at in zip(parts, torch.arange(len(lookup.ids)).tensor_split(self._steps), strict=True):
                counts = shows[at], clicks[at] if clicks is not None else None
                part += [_Rows(*stores, table, lookup.ids[at], sharing[at], *counts)] if len(at) else []
        if self.dense is not None:
            parts[0].append(self.dense)
        self._parts.extend(part for part in parts if part)

    def _go_on(self) -> None:
        """Take what has been asked for, ask for what has gone out, and send the next part."""
        for part in self._coming:
            part.take()
        for part in self._out:
            part.ask()
        self._coming, self._out = self._out, self._parts.popleft() if self._parts else []
        for part in self._out:
            part.push()
        if self._out:
            self._remote.done(1.0)

    def _arrive(self) -> None:
        """Wait until all that was divided has come back, and so was applied."""
        while self._parts or self._out or self._coming:
            self._go_on()
        self.applied = self._divided

    def end_day(self, table: int, decay: float) -> None:
        """On the servers."""
        self._remote.end_day(table, decay)

    def shrink(self, table: int, score_below: float, unseen_days: int, click_weight: float) -> int:
        """On the servers."""
        return self._remote.shrink(table, score_below, unseen_days, click_weight)

    def rows(self, table: int) -> int:
        """On the servers."""
        return self._remote.rows(table)

    def _sharing(self, touched: Tensor) -> Tensor:
        """How many workers, this one included, change a row between two meetings, if it was in so many of our steps."""
        never = (1 - touched / self.made).clamp_(min=0.0) ** self._steps
        return 1 + (self._workers - 1) * (1 - never)

    def _fetch(self, table: int, ids: Tensor) -> None:
        rows = self._remote.pull(table, ids)
        self._local.set(table, ids, rows)
        self._bases[table].set(ids, rows)


class Part(Protocol):
    """Something that meets the servers': in three steps, one after the other."""

    def push(self) -> None:
        """Hand over what this worker has learnt."""

    def ask(self) -> None:
        """Ask for what has become of it."""

    def take(self) -> None:
        """Take that, and add what was learnt since."""


@dataclass
class _Rows:
    """Some rows of a table: distinct ids, how many workers share each one's difference, and what is counted of them."""

    local: LocalStore
    remote: RemoteStore
    bases: _Bases
    table: int
    ids: Tensor
    sharing: Tensor
    shows: Tensor
    clicks: Tensor | None

    def push(self) -> None:
        self._sent = self.local.pull(self.table, self.ids)
        learnt = (self._sent - self.bases.of(self.ids)) / self.sharing[:, None]
        self.remote.push(self.table, Gradients(self.ids, learnt, self.shows, self.clicks))

    def ask(self) -> None:
        self._asked = self.remote.start_pull(self.table, self.ids)

    def take(self) -> None:
        base = self.remote.finish_pull(self.table, self.ids, self._asked)
        since = self.local.pull(self.table, self.ids) - self._sent
        self.local.set(self.table, self.ids, base + since)
        self.bases.set(self.ids, base)


class _Bases:
    """The rows as they were when this worker and the servers last met; apart, what is looked at in every step."""

    def __init__(self, dim: int) -> None:
        self._rows = _Columns(dim)
        self._marks = _Columns(2)  # whether the row is known, and in how many steps of this worker it was

    def known(self, ids: Tensor) -> Tensor:
        """Whether there are rows of these ids."""
        return self._marks.of(ids)[:, 0] != 0

    def of(self, ids: Tensor) -> Tensor:
        """The rows."""
        return self._rows.of(ids)

    def count(self, ids: Tensor, steps: Tensor) -> Tensor:
        """Count more steps in which rows were; how many it is now."""
        marks = self._marks.of(ids)
        marks[:, 1] += steps
        self._marks.set(ids, marks)
        return marks[:, 1]

    def set(self, ids: Tensor, rows: Tensor) -> None:
        """Let rows be known, as these."""
        self._rows.set(ids, rows)
        marks = self._marks.of(ids)
        marks[:, 0] = 1
        self._marks.set(ids, marks)


class _Columns:
    """Numbers by id, zero at first."""

    def __init__(self, dim: int) -> None:
        self._dim, self._table = dim, Table(TableSpec("bases", dim, None, "zeros").config())

    def of(self, ids: Tensor) -> Tensor:
        numbers, ids = torch.empty(len(ids), self._dim), ids.contiguous()
        self._table.pull(ids.data_ptr(), len(ids), numbers.data_ptr())
        return numbers

    def set(self, ids: Tensor, numbers: Tensor) -> None:
        ids, numbers = ids.contiguous(), numbers.contiguous()
        self._table.set(ids.data_ptr(), len(ids), numbers.data_ptr())
