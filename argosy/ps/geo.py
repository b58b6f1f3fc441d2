"""Training far from the servers: every worker steps on rows of its own, and tells what has become of them now and then.

A row is fetched when the worker first needs it. From then on it is the worker's, with an optimizer of its own, and
after every k steps the differences since the last time are added to the servers' rows, which then come back with what
others have added. On a slow link that is k times fewer messages, each with the rows of k steps once.

What all workers change, the dense parameters, is averaged (`dense.py`): each has gone the way that the gradients show,
and the sum would go it several times. What one alone has changed is added as it is. A row is in between: some are in
every batch, most in few. So its difference is divided by the number of workers that will have changed it in as many
steps, as far as this one can tell from how often it has met the row itself.

Which ids get a row, servers say when workers meet: one that has to wait begins anew, as it does in other modes.
"""

from __future__ import annotations

import dataclasses

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
        self._pushed: dict[int, list[Gradients]] = {}  # since the last meeting, without their rows
        self._done = self._met = 0  # steps, and those of them before the last meeting
        self.dense: AveragedParameters | None = None  # what meets the servers' at the same time

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
        self._meet_again()
        return self._remote.look(table, ids)

    def push(self, table: int, gradients: Gradients) -> None:
        """Step on this worker's rows."""
        self._local.push(table, gradients)
        self.left_out = self._local.left_out
        self._pushed.setdefault(table, []).append(dataclasses.replace(gradients, rows=torch.empty(0), pulled=None))

    def done(self, weight: float) -> None:
        """After every k steps, meet."""
        self._local.done(weight)
        self._done += 1
        if self._done % self._steps == 0:
            self.meet()

    def meet(self) -> None:
        """Add what was learnt since the last time to the servers' rows, and take what they have become."""
        pushed, self._pushed = self._pushed, {}
        self._met = self._done
        met = {table: Lookup.of(torch.cat([each.ids for each in several])) for table, several in pushed.items()}
        for table, lookup in met.items():
            learnt = self._local.pull(table, lookup.ids) - self._bases[table].of(lookup.ids)
            learnt /= self._sharing(self._bases[table].count(lookup.ids, steps=lookup.shows))[:, None]
            self._remote.push(table, Gradients(lookup.ids, learnt, *counted(pushed[table], lookup)))
        if self.dense is not None:
            self.dense.push()
        self._remote.done(1.0)
        for table, lookup in met.items():
            self._fetch(table, lookup.ids)
        if self.dense is not None:
            self.dense.pull()

    def settle(self) -> None:
        """Leave nothing that the servers do not know."""
        self._meet_again()
        self._remote.settle()

    def end_day(self, table: int, decay: float) -> None:
        """On the servers."""
        self._remote.end_day(table, decay)

    def shrink(self, table: int, score_below: float, unseen_days: int, click_weight: float) -> int:
        """On the servers."""
        return self._remote.shrink(table, score_below, unseen_days, click_weight)

    def rows(self, table: int) -> int:
        """On the servers."""
        return self._remote.rows(table)

    def _meet_again(self) -> None:
        if self._done > self._met:
            self.meet()

    def _sharing(self, touched: Tensor) -> Tensor:
        """How many workers, this one included, change a row between two meetings, if it was in so many of our steps."""
        never = (1 - touched / self._done).clamp_(min=0.0) ** self._steps
        return 1 + (self._workers - 1) * (1 - never)

    def _fetch(self, table: int, ids: Tensor) -> None:
        rows = self._remote.pull(table, ids)
        self._local.set(table, ids, rows)
        self._bases[table].set(ids, rows)


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
