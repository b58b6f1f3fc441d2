"""A table as a dictionary of rows, in plain torch: what the native one is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from argosy import _native


class Rows:
    """The native table behind tensors."""

    def __init__(self, config: bytes, isa: str | None = None) -> None:
        self.native = _native.Table(config, isa)

    def pull(self, ids: Tensor | list[int]) -> Tensor:
        ids = torch.as_tensor(ids, dtype=torch.int64).contiguous()
        out = torch.full((ids.numel(), self.native.dim), float("nan"))
        self.native.pull(ids.data_ptr(), ids.numel(), out.data_ptr())
        return out

    def push(
        self,
        ids: Tensor | list[int],
        gradients: Tensor,
        shows: list[int] | None = None,
        clicks: list[float] | None = None,
        pulled: Tensor | None = None,
        **numbers: float,
    ) -> dict[str, int]:
        ids = torch.as_tensor(ids, dtype=torch.int64).contiguous()
        gradients = gradients.float().contiguous()
        assert gradients.shape == (ids.numel(), self.native.dim)
        show = torch.tensor(shows, dtype=torch.int32) if shows is not None else None
        click = torch.tensor(clicks) if clicks is not None else None
        addresses = [tensor.data_ptr() if tensor is not None else 0 for tensor in (show, click, pulled)]
        return self.native.push(ids.data_ptr(), ids.numel(), gradients.data_ptr(), *addresses, **numbers)

    def set(self, ids: Tensor | list[int], values: Tensor) -> None:
        ids = torch.as_tensor(ids, dtype=torch.int64).contiguous()
        values = values.contiguous()
        self.native.set(ids.data_ptr(), ids.numel(), values.data_ptr())

    def scan(self, room: int = 1000) -> dict[int, tuple[Tensor, Tensor, tuple[float, float]]]:
        """All rows: value, state, (show, click)."""
        cursor, rows = 0, {}
        while True:
            ids, values = torch.empty(room, dtype=torch.int64), torch.empty(room, self.native.dim)
            state, counters = torch.empty(room, self.native.state_floats), torch.empty(room, 2)
            addresses = (tensor.data_ptr() for tensor in (ids, values, state, counters))
            cursor, found = self.native.scan(cursor, room, *addresses)
            for i in range(found):
                assert int(ids[i]) not in rows, "a row was read twice"
                rows[int(ids[i])] = (
                    values[i].clone(),
                    state[i].clone(),
                    (float(counters[i, 0]), float(counters[i, 1])),
                )
            if cursor == 0:
                return rows


class PlainTable:
    """Adagrad on a dictionary: initial values zero, admission by count, counters, decay, shrink."""

    def __init__(self, dim: int, lr: float, count: int) -> None:
        self.dim, self.lr, self.count = dim, lr, count
        self.values: dict[int, Tensor] = {}
        self.sums: dict[int, Tensor] = {}
        self.counters: dict[int, list[float]] = {}
        self.days: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self.waiting_days: dict[int, int] = {}

    def pull(self, ids: list[int]) -> Tensor:
        return torch.stack([self.values.get(id, torch.zeros(self.dim)) for id in ids])

    def push(self, ids: list[int], gradients: Tensor, shows: list[int], clicks: list[float]) -> dict[str, int]:
        done = dict.fromkeys(("updated", "admitted", "waiting", "not_finite"), 0)
        for id, gradient, show, click in zip(ids, gradients, shows, clicks, strict=True):
            if not gradient.isfinite().all():
                done["not_finite"] += 1
                continue
            if id not in self.values:
                seen = self.waiting.pop(id, 0) + show
                if seen < self.count:
                    self.waiting[id], self.waiting_days[id] = seen, 0
                    done["waiting"] += 1
                    continue
                self.values[id], self.sums[id] = torch.zeros(self.dim), torch.zeros(self.dim)
                self.counters[id], show = [0.0, 0.0], seen
                done["admitted"] += 1
            self.sums[id] = self.sums[id] + gradient**2
            self.values[id] = self.values[id] - self.lr * gradient / (self.sums[id].sqrt() + 1e-10)
            self.counters[id][0] += show
            self.counters[id][1] += click
            self.days[id] = 0
            done["updated"] += 1
        return done

    def end_day(self, decay: float) -> None:
        for id in self.values:
            self.counters[id] = [number * decay for number in self.counters[id]]
            self.days[id] += 1
        for id in self.waiting:
            self.waiting_days[id] += 1

    def shrink(self, score_below: float, unseen_days: int, click_weight: float) -> int:
        gone = [
            id
            for id, (show, click) in self.counters.items()
            if show + click_weight * click < score_below or 0 < unseen_days <= self.days[id]
        ]
        for id in gone:
            del self.values[id], self.sums[id], self.counters[id], self.days[id]
        for id in [id for id in self.waiting if 0 < unseen_days <= self.waiting_days[id]]:
            del self.waiting[id]
        return len(gone)
