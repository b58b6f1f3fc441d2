"""Rows that a worker trains by itself: what of their differences it hands to the servers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from argosy.ps.geo import GeoStore
from argosy.ps.rules import MOST_DIM, SGD
from argosy.ps.spec import TableSpec
from argosy.ps.store import Gradients, LocalStore

STEPS, WORKERS = 4, 3


class Servers(LocalStore):
    """Plain sums, in this process; `learnt` has what came last."""

    def __init__(self) -> None:
        super().__init__()
        self.learnt: dict[int, float] = {}

    def start_pull(self, table: int, ids: Tensor) -> Tensor:
        return self.pull(table, ids)

    def finish_pull(self, table: int, ids: Tensor, started: Tensor) -> Tensor:
        return started

    def push(self, table: int, gradients: Gradients) -> None:
        self.learnt = {
            **getattr(self, "learnt", {}),
            **dict(zip(gradients.ids.tolist(), gradients.rows[:, 0].tolist(), strict=True)),
        }
        super().push(table, gradients)


def step(store: GeoStore, *ids: int) -> None:
    wanted = torch.tensor(ids)
    store.pull(0, wanted)
    store.push(0, Gradients(wanted, torch.ones(len(ids), 2), torch.ones(len(ids), dtype=torch.int32)))
    store.done(1.0)


def rows(store: LocalStore, *ids: int) -> Tensor:
    return store.pull(0, torch.tensor(ids))[:, 0]


def test_differences_are_shared_as_often_as_rows_are_met() -> None:
    servers = Servers()
    store = GeoStore(servers, STEPS, WORKERS)  # type: ignore[arg-type]
    store.open(0, TableSpec("rows", 2, SGD(lr=1.0), "zeros"))
    for _ in range(5):
        for number in range(STEPS):
            step(store, 1, 2) if number == 0 else step(store, 1)
    # Row 1 is in all steps: all three workers change it, and the sum of their thirds is the mean. Row 2 is in one of
    # four: another worker has it within four steps with 1 - (3/4)^4.
    assert servers.learnt[1] == pytest.approx(-STEPS / WORKERS)
    assert servers.learnt[2] == pytest.approx(-1 / (1 + 2 * (1 - 0.75**4)))
    for _ in range(4 * STEPS):
        step(store, 1)
    step(store, 3)
    store.settle()
    # Row 3 was in one step of 37: it is as good as this worker's alone.
    assert servers.learnt[3] == pytest.approx(-1 / (1 + 2 * (1 - (36 / 37) ** 4)))
    torch.testing.assert_close(rows(servers, 1, 2, 3), store.pull(0, torch.tensor([1, 2, 3]))[:, 0])


def test_one_worker_keeps_all_it_has_learnt() -> None:
    servers = Servers()
    store = GeoStore(servers, STEPS, 1)  # type: ignore[arg-type]
    store.open(0, TableSpec("rows", 2, SGD(lr=1.0), "zeros"))
    for _ in range(2 * STEPS):
        step(store, 1)
    store.settle()
    assert rows(servers, 1).tolist() == [-2.0 * STEPS]


def test_servers_count_shows_and_clicks_and_let_ids_in() -> None:
    servers = Servers()
    store = GeoStore(servers, STEPS, 1)  # type: ignore[arg-type]
    store.open(0, TableSpec("rows", 2, SGD(lr=1.0), "zeros", entry="count:12"))
    ids, shows, clicks = torch.tensor([1]), torch.tensor([2], dtype=torch.int32), torch.ones(1)
    for met in range(2):
        for _ in range(STEPS):
            store.push(0, Gradients(ids, torch.ones(1, 2), shows, clicks))
            store.done(1.0)
        store.settle()
        assert store.rows(0) == met  # seen 8 times, then 16
    assert rows(servers, 1).tolist() == [-1.0 * STEPS]  # what was learnt before is lost, as everywhere
    # The table on the servers has all 16 shows, and the clicks of the push that made the row.
    assert servers.shrink(0, 19.5, 0, 1.0) == 0
    assert servers.shrink(0, 20.5, 0, 1.0) == 1


def test_what_is_learnt_while_rows_travel_is_kept() -> None:
    """Another worker adds 10 while a row is on its way, and this one goes on."""
    servers = Servers()
    store = GeoStore(servers, STEPS, 1)  # type: ignore[arg-type]
    store.open(0, TableSpec("rows", 2, SGD(lr=1.0), "zeros"))
    for _ in range(STEPS + 1):
        step(store, 1, 2, 3, 4)  # four rows in four parts, of which the first has gone out
    assert servers.learnt == {1: -(STEPS + 1.0)}
    others = Gradients(torch.tensor([1]), torch.full((1, 2), 10.0), torch.ones(1, dtype=torch.int32))
    LocalStore.push(servers, 0, others)
    assert rows(store, 1).tolist() == [-STEPS - 1.0], "it has not come back"  # type: ignore[arg-type]
    for _ in range(2):
        step(store, 1, 2, 3, 4)
    assert rows(store, 1).tolist() == [10 - STEPS - 3.0]  # type: ignore[arg-type]
    store.settle()
    assert rows(servers, 1, 2, 3, 4).tolist() == [10 - STEPS - 3.0] + 3 * [-STEPS - 3.0]
    torch.testing.assert_close(rows(servers, 1, 2, 3, 4), rows(store, 1, 2, 3, 4))  # type: ignore[arg-type]


def test_steps_are_applied_when_all_of_them_has_travelled() -> None:
    store = GeoStore(Servers(), STEPS, 1)  # type: ignore[arg-type]
    store.open(0, TableSpec("rows", 2, SGD(lr=1.0), "zeros"))
    seen = []
    for number in range(2 * STEPS + 1):
        step(store, number)
        seen.append((store.made, store.applied))
    assert seen[STEPS - 1 :: STEPS] == [(STEPS, 0), (2 * STEPS, STEPS)]
    store.settle()
    assert (store.made, store.applied) == (2 * STEPS + 1, 2 * STEPS + 1)


def test_what_is_left_is_met_before_a_look_and_at_the_end() -> None:
    servers = Servers()
    store = GeoStore(servers, STEPS, 1)  # type: ignore[arg-type]
    store.open(0, TableSpec("rows", 2, SGD(lr=1.0), "zeros"))
    step(store, 1)
    assert store.look(0, torch.tensor([1]))[:, 0].tolist() == [-1.0]
    step(store, 1)
    store.settle()
    assert rows(servers, 1).tolist() == [-2.0]


def test_rows_may_be_as_wide_as_elsewhere() -> None:
    servers = Servers()
    store = GeoStore(servers, STEPS, 1)  # type: ignore[arg-type]
    store.open(0, TableSpec("rows", MOST_DIM, SGD(lr=1.0), "zeros"))
    ids, gradient = torch.tensor([1]), torch.ones(1, MOST_DIM)
    for _ in range(STEPS):
        store.pull(0, ids)
        store.push(0, Gradients(ids, gradient, torch.ones(1, dtype=torch.int32)))
        store.done(1.0)
    store.settle()
    assert torch.equal(servers.pull(0, ids), -STEPS * gradient)
