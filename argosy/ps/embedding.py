"""`argosy.Embedding`: an embedding whose vocabulary is open. Any 64-bit id has a row, from its first gradient on.

The module has no parameters: its rows are in a table (`store.py`), in this process or on servers, which is also where
its optimizer is. Forward pulls the rows of the batch, backward adds up their gradients, and the step of the optimizer
that was distributed with the model pushes them (`tables.py`).
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from argosy.config import ConfigError
from argosy.ps.ahead import Ahead
from argosy.ps.lookup import Bags, Lookup
from argosy.ps.merge import merged
from argosy.ps.rules import Adagrad, RowRule
from argosy.ps.spec import TableSpec
from argosy.ps.store import Gradients, LocalStore, Store

Mode = Literal["none", "sum", "mean"]


class Embedding(nn.Module):
    """Rows of `dim` numbers for any int64 ids.

    `initializer`: `zeros`, `constant:0.1`, `uniform:0.01`, `normal:0.01`; the first value of a row depends on the seed,
    the id and the column alone. `optimizer`: one of `argosy.ps`. `entry`: which ids get a row: `always`, `count:5` when
    they are seen the fifth time (an id is seen at each of its places in the batches that are pushed),
    `probability:0.1`. `mode`: `sum` or `mean` makes one row of each bag of ids. `name` tells tables of a job apart; by
    default it is the module's place in the model.

    Rows are no parameters: `state_dict()` does not have them, and `parameters()` neither. `copy.deepcopy` of a model
    that has rows, or is distributed, gives one that looks at the same rows, as they are at the time, and does not train
    them: for an evaluation, or beside an average of the dense parameters.

    >>> import torch, argosy
    >>> words = argosy.Embedding(2, initializer="zeros", optimizer=argosy.ps.SGD(lr=0.5))
    >>> words(torch.tensor([3, 1 << 40])).sum().backward()
    >>> words.step()
    >>> words(torch.tensor([3, 4])).tolist()
    [[-0.5, -0.5], [0.0, 0.0]]
    """

    def __init__(
        self,
        dim: int,
        *,
        name: str = "",
        initializer: str = "uniform:0.01",
        optimizer: RowRule | None = None,
        entry: str = "always",
        mode: Mode = "none",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if mode not in ("none", "sum", "mean"):
            raise ValueError(f"mode={mode!r}: expected none, sum or mean")
        self.dim, self.mode = dim, mode
        self.spec = TableSpec(name, dim, optimizer or Adagrad(lr=0.05), initializer, entry, seed)
        self._store: Store = LocalStore()
        self._table = 0
        self._store.open(0, self.spec)
        self._bound = False
        self._only_looks = False
        self._waiting: list[Gradients] = []
        self._share: Callable[[], float] = lambda: 1.0  # of a batch's gradient in that of its step
        self._anchor = torch.empty(0, requires_grad=True)  # lets autograd call us: the rows are no parameters
        self.ahead = Ahead()

    def forward(self, ids: Tensor, offsets: Tensor | None = None, *, clicks: Tensor | None = None) -> Tensor:
        """The rows of `ids`, of any shape; in the modes `sum` and `mean`, one for each bag.

        Bags are the rows of two-dimensional ids, or begin at `offsets` of one-dimensional ones, as in
        `torch.nn.EmbeddingBag`. `clicks`, one for each output, is added to the counters of the ids by the next push.
        """
        if not isinstance(ids, Tensor):
            raise TypeError(f"ids are a {type(ids).__name__}; an embedding takes a tensor of torch.int64")
        if self._only_looks or not torch.is_grad_enabled():
            lookup = self._look_up(ids, offsets)
            return lookup.spread(self._store.look(self._table, lookup.ids))
        lookup, rows = self._pulled(ids, offsets)
        self._check_clicks(clicks, lookup)
        return _Spread.apply(self._anchor, self, lookup, rows, clicks)  # type: ignore[no-any-return, no-untyped-call]

    def prefetch(self, ids: Tensor, offsets: Tensor | None = None) -> None:
        """Ask for the rows of a batch that will come next; `forward` with the same tensors then finds them there."""
        lookup = self._look_up(ids, offsets)
        started = self._store.start_pull(self._table, lookup.ids)
        if started is not None:
            for forgotten in self.ahead.put(ids, offsets, lookup, started):
                self._store.forget_pull(forgotten)

    def step(self) -> None:
        """Push the gradients since the last step. A distributed optimizer does this by itself, with its own step."""
        if self._only_looks:
            raise RuntimeError(
                f"the embedding {self.spec.name!r} is a copy, which looks at the rows of the original and does not "
                f"train them: step the original"
            )
        self.push(discard=False)
        self._store.done(1.0)

    def push(self, *, discard: bool) -> None:
        """Hand gradients over, without ending the step; or drop them, as those of a batch without a sample."""
        waiting, self._waiting = self._waiting, []
        if waiting and not discard:
            self._store.push(self._table, merged(waiting))

    def bind(self, store: Store, table: int, place: str, share: Callable[[], float] | None = None) -> None:
        """Let the rows live in a store, as table number `table`. `place` is the module's name in the model.

        `share` says how much of the step's gradient that of the batch in hand is, if several batches make a step here.
        """
        if self._bound or self._store.rows(self._table):
            raise RuntimeError(
                f"the embedding {place!r} has rows in this process already: distribute the model before it is trained, "
                f"and only once"
            )
        spec = dataclasses.replace(self.spec, name=self.spec.name or place)
        store.open(table, spec)
        self._store, self._table, self.spec, self._bound = store, table, spec, True
        self._share = share or self._share

    @property
    def rows(self) -> int:
        """How many ids have a row."""
        return self._store.rows(self._table)

    def end_day(self, decay: float = 0.98) -> None:
        """Let counters of shows and clicks fade, and rows that were not pushed age by a day. One worker calls it."""
        if not 0 <= decay <= 1:
            raise ConfigError("decay", decay, "it is a share, from 0 to 1")
        self._store.end_day(self._table, decay)

    def shrink(self, score_below: float = 0.0, unseen_days: int = 0, click_weight: float = 1.0) -> int:
        """Remove rows with shows + click_weight * clicks below a score, or unseen for so many days; how many went.

        0 leaves a rule out. One worker calls it.
        """
        for name, value in (("score_below", score_below), ("click_weight", click_weight)):
            if not 0 <= value < math.inf:
                raise ConfigError(name, value, "it must be 0 or more, and finite")
        if not isinstance(unseen_days, Integral) or unseen_days < 0:
            raise ConfigError("unseen_days", unseen_days, "days are a whole number, 0 or more")
        return self._store.shrink(self._table, score_below, unseen_days, click_weight)

    def extra_repr(self) -> str:
        """What tells it from others."""
        return f"{self.dim}, name={self.spec.name!r}, optimizer={self.spec.optimizer}, entry={self.spec.entry!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Embedding:
        own = not (self._bound or self._only_looks or self.rows)
        store: Store = LocalStore() if own else self._store
        if own:
            store.open(self._table, self.spec)
        # What is under way stays with the original.
        memo |= {id(self._store): store, id(self._waiting): [], id(self.ahead): Ahead()}
        copied = memo[id(self)] = type(self).__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        copied._only_looks = not own
        return copied

    def _pulled(self, ids: Tensor, offsets: Tensor | None) -> tuple[Lookup, Tensor]:
        asked = self.ahead.take(ids, offsets)
        if asked is not None:
            lookup, started = asked
            return lookup, self._store.finish_pull(self._table, lookup.ids, started)
        lookup = self._look_up(ids, offsets)
        return lookup, self._store.pull(self._table, lookup.ids)

    def _look_up(self, ids: Tensor, offsets: Tensor | None) -> Lookup:
        if ids.dtype != torch.int64:
            raise TypeError(f"ids are {ids.dtype}; an embedding takes torch.int64: use ids.long()")
        if ids.device.type != "cpu":
            raise TypeError(f"ids are on {ids.device}; tables take ids on the CPU: use ids.cpu()")
        return Lookup.of(ids, self._bags(ids, offsets))

    def _bags(self, ids: Tensor, offsets: Tensor | None) -> Bags | None:
        if self.mode == "none":
            if offsets is not None:
                raise ValueError("offsets are for bags: make the embedding with mode='sum' or mode='mean'")
            return None
        if offsets is None:
            if ids.dim() != 2:
                raise ValueError(f"ids have {ids.dim()} dimensions: bags are rows of two, or begin at offsets of one")
            ends = torch.arange(0, ids.numel() + 1, ids.shape[1]) if ids.shape[1] else torch.zeros(len(ids) + 1).long()
            return Bags(ends, self.mode == "mean")
        if ids.dim() != 1 or offsets.dim() != 1 or offsets.dtype != torch.int64:
            raise ValueError("with offsets, ids have one dimension, and offsets are one-dimensional torch.int64")
        ends = torch.cat([offsets, torch.tensor([len(ids)])])
        if len(offsets) and (int(offsets[0]) != 0 or bool((ends.diff() < 0).any())):
            raise ValueError(f"offsets begin at 0, rise, and end within the {len(ids)} ids; got {offsets.tolist()[:8]}")
        return Bags(ends, self.mode == "mean")

    def _check_clicks(self, clicks: Tensor | None, lookup: Lookup) -> None:
        if clicks is not None and clicks.numel() != lookup.outputs:
            raise ValueError(
                f"clicks has {clicks.numel()} numbers, and {lookup.outputs} rows come out of embedding "
                f"{self.spec.name!r}: give one for each"
            )

    def _keep(self, lookup: Lookup, rows: Tensor, gradient: Tensor, clicks: Tensor | None) -> None:
        counted = lookup.add_up_clicks(clicks) if clicks is not None else None
        pulled = rows if self._store.compensates else None
        summed, share = lookup.add_up(gradient), self._share()
        if share != 1:
            summed *= share
        self._waiting.append(Gradients(lookup.ids, summed, lookup.shows, counted, pulled))


class _Spread(torch.autograd.Function):
    """Rows spread over a batch; backward leaves the gradients with the embedding."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, embedding: Embedding, lookup: Lookup, rows: Tensor, clicks: Tensor | None
    ) -> Tensor:
        ctx.kept = embedding, lookup, rows, clicks
        return lookup.spread(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        embedding, lookup, rows, clicks = ctx.kept
        embedding._keep(lookup, rows, gradient, clicks)
        return (None,) * 5
