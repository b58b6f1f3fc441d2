"""Tables on servers, and which pull waits for which push.

A server keeps a clock for each worker: the steps that it has done. A pull names two numbers: what this worker's own
clock must have reached, and what all clocks must have (where gradients are gathered: how many steps were applied). So
all consistencies are one mechanism, and this file is where they are told apart: docs/ps.md has a picture of each.

Dense parameters are vectors here, cut into as many ranges as there are servers.

[Note: curvature of a mean]
A delayed gradient g is made up to g + h (now - pulled), where h estimates the curvature of the loss: the mean of the
squared gradients of single samples, as the Fisher information has it. What is pushed is the mean gradient of n samples.
Where the loss is near its least, the gradients of samples are as good as independent with mean zero, and the square of
their mean is a n-th of the mean of their squares. So h is n g^2. With g^2 alone, and a factor found for small batches,
nothing would be made up.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import torch
from torch import Tensor

from argosy._native import PsClient
from argosy.ps.config import Consistency
from argosy.ps.merge import merged
from argosy.ps.spec import TableSpec
from argosy.ps.store import Gradients, Store

COMPENSATION: Final = 1.0
"""How much of the curvature makes up for a delay (Zheng et al., 2017). See [Note: curvature of a mean]."""


class RemoteStore(Store):
    """The servers' tables, as one worker sees them."""

    def __init__(
        self,
        client: PsClient,
        servers: int,
        consistency: Consistency,
        timeout_seconds: float,
        rank: int = 0,
        *,
        may_be_late: bool = False,
    ) -> None:
        """`may_be_late`: steps are applied without waiting for every worker."""
        self._client, self._servers, self._mode, self._timeout = client, servers, consistency, timeout_seconds
        self._may_be_late = may_be_late
        self.compensates = consistency.compensated
        self.looks_ahead = consistency.kind != "sync"  # there a worker may pass over the next batch
        self._merged_steps = consistency.number if consistency.kind == "half-async" else 1
        self._specs: dict[int, TableSpec] = {}
        self._vectors: dict[int, list[slice]] = {}  # the ranges of each
        # A script that leaves the job and joins it again has tables of its own, and goes on with the clock that it has.
        told = self.stats()
        self._first: int = max(each["lives"][rank] for each in told) << 16  # number of a table or range
        self._sent: int = max(max(each["clocks"][rank], each["version"]) for each in told)  # steps that were sent
        self._held: dict[int, list[Gradients]] = {}  # gradients that wait to be merged with those of the next steps
        self._held_vectors: dict[int, tuple[Tensor, float, Tensor | None]] = {}
        self._steps_held, self._weight_held = 0, 0.0

    def open(self, table: int, spec: TableSpec) -> None:
        """Make a table on every server."""
        self._specs[table] = spec
        self._client.create_table(self._first + table, spec.config())

    def pull(self, table: int, ids: Tensor) -> Tensor:
        """The rows as they are after the steps that this mode waits for."""
        return self.finish_pull(table, ids, self._ask(table, ids, self._gate()))

    def look(self, table: int, ids: Tensor) -> Tensor:
        """The rows as they are now, with what this worker has done; in `sync`, with what all have."""
        self._send_held()
        return self.finish_pull(table, ids, self._ask(table, ids, self._loose_gate()))

    def start_pull(self, table: int, ids: Tensor) -> int | None:
        """Ask for the rows of the next step."""
        return self._ask(table, ids, self._gate()) if self.looks_ahead else None

    def forget_pull(self, started: Any) -> None:
        """Let go of the rows when they have come."""
        self._client.take_pull(started, self._timeout)
        self._client.release_pull(started)

    def finish_pull(self, table: int, ids: Tensor, started: Any) -> Tensor:
        """The rows that were asked for."""
        rows = torch.empty(len(ids), self._specs[table].dim)
        self._client.finish_pull(started, rows.data_ptr(), self._timeout)
        return rows

    def push(self, table: int, gradients: Gradients) -> None:
        """Hand gradients over when the step is done, or a few steps later."""
        self._held.setdefault(table, []).append(gradients)

    def done(self, weight: float) -> None:
        """End a step. What is merged waits for the last push to be applied, unless it is as much as may be."""
        self._steps_held += 1
        self._weight_held += weight
        if self._merged_steps > 1 and self._client.is_pushing:
            if self._steps_held < self._merged_steps:
                return
            self._client.flush(self._timeout)
        self._send()

    @property
    def made(self) -> int:
        """Steps that this worker has made, or passed over."""
        return self._sent

    @property
    def over(self) -> int:
        """Steps that all servers have applied, as far as they have told; where gradients are gathered."""
        return self._client.steps_over

    def pass_over(self) -> None:
        """Leave a step to the others: it is over. Servers do not wait for a step that they have applied."""
        self._sent += 1

    def rest(self) -> None:
        """Nobody is to wait for this worker until it asks for rows or parameters again."""
        if self._mode.kind == "ssp":
            self._client.rest(self._timeout)

    def settle(self) -> None:
        """Send what is held, and wait until all of it is applied."""
        self._send_held()
        self._client.flush(self._timeout)

    def open_vector(self, number: int, config: bytes, numbers: int) -> None:
        """Make a vector of dense parameters, a range on each server. Its numbers begin as zeros."""
        bounds = [numbers * server // self._servers for server in range(self._servers + 1)]
        self._vectors[number] = [slice(*pair) for pair in itertools.pairwise(bounds)]
        for server, part in enumerate(self._vectors[number]):
            if part.stop > part.start:
                self._client.create_range(self._range(number, server), config, part.stop - part.start, server)

    def set_vector(self, number: int, values: Tensor) -> None:
        """Let a vector be this."""
        for place, part in self._ranges(number):
            self._client.set_range(place, values[part].data_ptr())

    def push_vector(self, number: int, gradient: Tensor, lr_factor: float, pulled: Tensor | None = None) -> None:
        """Hand a dense gradient over when the step is done, or later. `pulled` is what it was computed from."""
        before = self._held_vectors.get(number)
        if before is not None:
            gradient, pulled = before[0].add_(gradient), before[2]
        elif self._merged_steps > 1:  # the caller will use its memory again
            gradient = gradient.clone()
        self._held_vectors[number] = gradient, lr_factor, pulled

    def pull_vector(self, number: int, numbers: int, *, in_step: bool = True) -> Tensor:
        """A vector as it is after the steps that this mode waits for; between loops nobody is waited for."""
        return self.finish_vector(numbers, self._ask_vector(number, self._gate() if in_step else self._loose_gate()))

    def start_vector(self, number: int) -> Any:
        """Ask for a vector, as `pull_vector` does in a step."""
        return self._ask_vector(number, self._gate())

    def finish_vector(self, numbers: int, started: Any) -> Tensor:
        """The vector that was asked for."""
        out = torch.empty(numbers)
        for ticket, part in started:
            self._client.finish_pull(ticket, out[part].data_ptr(), self._timeout)
        return out

    def end_day(self, table: int, decay: float) -> None:
        """On every server."""
        self._client.end_day(self._first + table, decay)

    def shrink(self, table: int, score_below: float, unseen_days: int, click_weight: float) -> int:
        """On every server; how many rows went from all of them."""
        return self._client.shrink(self._first + table, score_below, unseen_days, click_weight)

    def rows(self, table: int) -> int:
        """How many ids have a row, on all servers together."""
        tables = (told for server in self.stats() for told in server["tables"])
        return sum(told["rows"] for told in tables if told["number"] == self._first + table)

    def stats(self) -> list[dict[str, Any]]:
        """What each server tells of itself: clocks, late gradients, staleness, tables."""
        return [self._client.stats(server) for server in range(self._servers)]

    def _gate(self) -> tuple[int, int]:
        """What a pull waits for: this worker's clock, and everybody's."""
        match self._mode.kind:
            case "sync":
                return 0, self._sent
            case "ssp":
                return self._sent, max(0, self._sent - self._mode.number)
            case "half-async":
                return 0, 0
        return self._sent, 0

    def _loose_gate(self) -> tuple[int, int]:
        """The same for a look that no step is made from: who is ahead must not wait for one who makes no more steps."""
        return (0, self._sent) if self._mode.kind == "sync" else (self._sent, 0)

    def _ask(self, table: int, ids: Tensor, gate: tuple[int, int]) -> int:
        own, everybody = gate
        ids = ids.contiguous()
        return self._client.start_pull(self._first + table, ids.data_ptr(), len(ids), own, everybody, distinct=True)

    def _ask_vector(self, number: int, gate: tuple[int, int]) -> list[tuple[int, slice]]:
        own, everybody = gate
        return [(self._client.start_pull_range(place, own, everybody), part) for place, part in self._ranges(number)]

    def _send_held(self) -> None:
        if self._steps_held:
            self._send()

    def _send(self) -> None:
        held, vectors, weight = self._held, self._held_vectors, self._weight_held
        curvature = COMPENSATION * weight if self.compensates else 0.0  # of a gradient's square
        batches = self._steps_held
        self._held, self._held_vectors, self._steps_held, self._weight_held = {}, {}, 0, 0.0
        for table, several in sorted(held.items()):
            self._push(table, merged(several), curvature)
        for number, (gradient, factor, pulled) in sorted(vectors.items()):
            for place, part in self._ranges(number):
                at = pulled[part].data_ptr() if pulled is not None else 0
                self._client.push_range(place, gradient[part].data_ptr(), at, curvature, factor, self._sent)
        self._client.done(self._sent, weight, batches, self._may_be_late)
        self._sent += 1

    def _push(self, table: int, gradients: Gradients, curvature: float) -> None:
        clicks, pulled = gradients.clicks, gradients.pulled
        self._client.push(
            self._first + table,
            gradients.ids.data_ptr(),
            len(gradients.ids),
            gradients.rows.data_ptr(),
            gradients.shows.data_ptr(),
            clicks.data_ptr() if clicks is not None else 0,
            pulled.data_ptr() if pulled is not None else 0,
            curvature,
            self._specs[table].factor(self._client.global_step),
            self._sent,
        )

    def _range(self, number: int, server: int) -> int:
        return self._first + number * self._servers + server

    def _ranges(self, number: int) -> list[tuple[int, slice]]:
        parts = enumerate(self._vectors[number])
        return [(self._range(number, server), part) for server, part in parts if part.stop > part.start]
