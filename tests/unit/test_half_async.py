"""Merging pushes: steps are sent together while the last push is under way, up to a number."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from argosy.ps.config import Consistency
from argosy.ps.remote import RemoteStore
from argosy.ps.rules import SGD
from argosy.ps.spec import TableSpec
from argosy.ps.store import Gradients


class Client:
    """What stands for servers: a push is under way until `flush`, or until somebody says that it is over."""

    global_step = 0

    def __init__(self) -> None:
        self.is_pushing, self.sent, self.flushed = False, list[tuple[float, int]](), 0
        self._pushed = 0.0

    def stats(self, server: int) -> dict[str, Any]:
        return {"lives": [0], "clocks": [0], "version": 0}

    def create_table(self, number: int, config: bytes) -> None: ...

    def push(self, table: int, ids_at: int, count: int, rows_at: int, *rest: Any) -> None:
        self._pushed = ctypes.c_float.from_address(rows_at).value
        self.is_pushing = True

    def done(self, step: int, weight: float, batches: int, may_be_late: bool) -> None:
        assert weight == batches
        self.sent.append((self._pushed, batches))

    def flush(self, timeout_seconds: float) -> None:
        self.is_pushing, self.flushed = False, self.flushed + 1


def step(store: RemoteStore, gradient: float) -> None:
    shows = torch.ones(1, dtype=torch.int32)
    store.push(0, Gradients(torch.tensor([7]), torch.full((1, 1), gradient), shows))
    store.done(1.0)


def test_steps_are_merged_while_a_push_is_under_way() -> None:
    client = Client()
    store = RemoteStore(client, 1, Consistency("half-async", 3), 5.0)  # type: ignore[arg-type]
    store.open(0, TableSpec("rows", 1, SGD(lr=1.0), "zeros"))
    step(store, 1.0)
    assert client.sent == [(1.0, 1)]  # nothing was under way: it goes at once
    step(store, 10.0)
    client.is_pushing = False
    step(store, 100.0)
    assert client.sent == [(1.0, 1), (110.0, 2)]
    for gradient in (1.0, 10.0, 100.0):
        step(store, gradient)
    assert client.flushed == 1  # no more than three: the last push is waited for
    assert client.sent[2:] == [(111.0, 3)]
    step(store, 1.0)
    store.settle()
    assert client.sent[3:] == [(1.0, 1)]
