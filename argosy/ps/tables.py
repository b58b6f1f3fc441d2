"""The tables of a job: the embeddings of its models, tied to the steps of its optimizer.

When the optimizer steps, every embedding's gradients are pushed, then those of dense parameters if servers have them,
and the step is done. If the loader has the next batch at hand, rows that it will need are asked for (`ahead.py`).

[Note: not before the push]
The rows of the next batch are asked for when this step's gradients are sent, and come with what these have changed,
while dense parameters come, the script goes round its loop and the loader gets the batch after that. Asked for a step
earlier they would come for nothing, behind the whole step; but they would lack this worker's own gradients and be
twice as old as the others': in a few runs on a click log with four workers that cost 0.002 to 0.005 of AUC.

[Note: who was where]
A `step` event has two times: `pushed`, just before the servers are told that this worker has done the step, and the
event's own, when the parameters of its next step have come. So from the events of all workers it can be told, on one
host's clock, that nobody began a step before the others had come as far as the mode wants: nobody's own time is before
the `pushed` that it waited for. A worker that waits for samples, which nobody waits for, writes `rest` first.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.optim import Optimizer

from argosy.comm.group import Group
from argosy.data.cursor import Cursor
from argosy.parallel.nothing import tolerate_empty_batches
from argosy.parallel.replicas import make_alike
from argosy.ps.ahead import Part
from argosy.ps.config import PsConfig
from argosy.ps.dense import AveragedParameters, ServedParameters
from argosy.ps.embedding import Embedding
from argosy.ps.served import Served
from argosy.ps.store import LocalStore, Store


def embeddings(model: nn.Module) -> Iterator[tuple[str, Embedding]]:
    """The open-vocabulary embeddings of a model, by their places in it."""
    for name, module in model.named_modules():
        if isinstance(module, Embedding):
            yield name or "embedding", module


class Tables:
    """Embeddings, and dense parameters that are served, in training. Without servers tables are in this process."""

    def __init__(self, served: Served | None, config: PsConfig, group: Group, cursor: Cursor) -> None:
        self._served, self._config, self._group, self._cursor = served, config, group, cursor
        self._store: Store = served.store if served is not None else LocalStore(rejects=config.rejects)
        self._embeddings: list[Embedding] = []
        self._names: dict[nn.Parameter, str] = {}
        self._optimizer: Optimizer | None = None
        self._dense: ServedParameters | None = None
        self._parts: dict[Embedding, tuple[Part, Part | None]] = {}
        self._coming: Any = None  # the batch that is trained on next
        self._leaving = ExitStack()
        if served is not None and config.gathered(group.size) and config.bears_losses(group.size):
            cursor.common = self

    def close(self) -> None:
        """Listen no more, and tell what no server has counted."""
        self._leaving.close()
        if left_out := self._store.left_out:
            print(f"argosy: gradients of rows that were not finite and were left out: {left_out}", file=sys.stderr)

    def before_saving(self, parts: Sequence[Any]) -> None:
        """Rows are not in checkpoints, and neither is what servers remember: say so, lest somebody relies on it."""
        if self._optimizer in parts and self._dense is not None and self._dense.remembers:
            warnings.warn(
                f"servers have the state of {type(self._optimizer).__name__} (dense=server), and checkpoints do not "
                f"hold it: whoever loads this one begins with a new state; dense=allreduce keeps it on the workers",
                stacklevel=3,
            )
        for model in (part for part in parts if isinstance(part, nn.Module)):
            for place, _ in embeddings(model):
                raise NotImplementedError(
                    f"the rows of {place!r} are in a table, and checkpoints do not hold tables yet: save other models, "
                    f"or parts of this one"
                )

    def after_loading(self, parts: Sequence[Any]) -> None:
        """Hand parameters that were loaded to the servers, if these have them. All workers call it."""
        models = (part for part in parts if isinstance(part, nn.Module))
        loaded = {parameter for model in models for parameter in model.parameters()}
        if self._dense is not None and self._dense.has(loaded):
            self._dense.load(self._group)

    def add_model(self, model: nn.Module) -> None:
        """Let the rows of a model's embeddings live in the job's store; give all workers the same dense parameters."""
        if self._served is not None and self._config.dense == "server":
            self._names |= {parameter: name for name, parameter in model.named_parameters()}
            make_alike(model, self._group)
            for hook in tolerate_empty_batches(model, lambda: self._cursor.samples == 0):
                self._leaving.callback(hook.remove)
        for place, embedding in embeddings(model):
            if self._served is None and self._group.size > 1:
                raise RuntimeError(
                    f"the embedding {place!r} would have a table of its own on each of {self._group.size} workers: "
                    f"start servers for it, `argosy run --servers 1 --strategy ps=sync`"
                )
            name = embedding.spec.name or place
            if any(name == other.spec.name for other in self._embeddings):
                raise ValueError(f"two embeddings are named {name!r}: give each a name of its own, Embedding(name=...)")
            # Servers weigh gradients themselves; here several batches may make a step.
            share = None if self._served is not None else lambda: self._cursor.share(1)
            embedding.bind(self._store, len(self._embeddings), name, share)
            self._embeddings.append(embedding)
            if self._store.looks_ahead and self._look_ahead not in self._cursor.coming:
                self._cursor.coming.append(self._look_ahead)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Push when this optimizer steps."""
        if not self._embeddings and self._served is None:
            return
        if self._optimizer is not None:
            raise RuntimeError(
                "tables are stepped with one optimizer, and two were distributed: give the parameters of both to one, "
                "as groups"
            )
        self._optimizer = optimizer
        self._drop_with_gradients(optimizer)
        if self._served is not None:  # nothing stays here that was learnt in a loop
            self._cursor.between_loops.append(self._store.settle)
        if self._served is not None and self._config.dense == "server":
            if self._served.geo is not None:  # the worker steps by itself, and then it may be time to meet
                averaged = AveragedParameters(optimizer, self._served.remote, self._group, self._names)
                self._served.geo.dense = averaged
                self._cursor.between_loops.append(averaged.pull)
                self._leaving.callback(optimizer.register_step_post_hook(self._push).remove)
                return
            self._dense = dense = ServedParameters(
                optimizer, self._served.remote, self._group, self._names, rejects=self._config.rejects
            )
            self._leaving.callback(optimizer.register_step_post_hook(lambda *_: dense.pull()).remove)
            if self._config.consistency().kind != "sync":
                self._cursor.between_loops.append(dense.look)
        self._leaving.callback(optimizer.register_step_pre_hook(self._push).remove)

    @property
    def made(self) -> int:
        """Steps that this worker has made, or passed over."""
        assert self._served is not None
        return self._served.remote.made

    @property
    def over(self) -> int:
        """Steps that are over; what comes for them is late, and dropped."""
        assert self._served is not None
        return self._served.remote.over

    def pass_over(self) -> None:
        """Leave a step that is over to those who made it."""
        assert self._served is not None
        self._served.remote.pass_over()
        self._cursor.passed += 1

    def catch_up(self) -> None:
        """Take the parameters that steps have made which this worker passed over. Rows are pulled when needed."""
        if self._dense is not None:
            self._dense.pull()

    def check_clipping(self) -> None:
        """Refuse to clip a gradient that is added up on servers: no worker knows its norm."""
        if self._dense is not None and self._config.gathered(self._group.size) > 1:
            raise RuntimeError(
                f"clip_norm: with ps={self._config.ps} servers add up the gradients of {self._group.size} workers, and "
                f"none knows the norm of the sum; use dense=allreduce, or ps=async, where each batch is a step"
            )

    def _drop_with_gradients(self, optimizer: Optimizer) -> None:
        """Let `optimizer.zero_grad()` forget the gradients of tables too, unless it is amid batches that add up."""
        inner = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            inner(set_to_none)
            if self._cursor.at is None or self._cursor.at.opens:
                for embedding in self._embeddings:
                    embedding.push(discard=True)

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        self._leaving.callback(delattr, optimizer, "zero_grad")

    def _push(self, *_: Any) -> None:
        empty = self._cursor.samples == 0
        for embedding in self._embeddings:
            embedding.push(discard=empty)
        if self._dense is not None:
            self._dense.push(empty=empty)
        self._cursor.pushed = time.time()  # before servers can know it: see [Note: who was where]
        self._store.done(float(self._cursor.samples))
        self._ask_ahead()

    def _look_ahead(self, batch: Any, coming: Any) -> None:
        """The batch after the next one is at hand; embeddings find its ids where those of `batch` were."""
        self._coming = coming
        for embedding in self._embeddings:
            if embedding not in self._parts and (found := embedding.ahead.parts(batch)) is not None:
                self._parts[embedding] = found

    def _ask_ahead(self) -> None:
        """Ask for the rows of the next batch, if it is at hand. See [Note: not before the push]."""
        coming, self._coming = self._coming, None
        if coming is None:
            return
        for embedding, (place, at) in self._parts.items():
            ids, offsets = place.of(coming), at.of(coming) if at is not None else None
            if ids is not None and (at is None or offsets is not None):
                embedding.prefetch(ids, offsets)
