"""Turns: steps of several buckets by turns, in an order that all workers have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from argosy.comm.pending import Done, Pending
from argosy.parallel.turns import Turns


class Exchange(Done):
    """Tells when it is waited for."""

    def __init__(self, told: list[str], name: str) -> None:
        self._told, self._name = told, name

    def wait(self, timeout_seconds: float | None = None) -> None:
        self._told.append(f"wait {self._name}")


def bucket(told: list[str], name: str, exchanges: int) -> Iterator[Pending]:
    for number in range(exchanges):
        told.append(f"{name}{number}")
        yield Exchange(told, f"{name}{number}")
    told.append(f"{name} done")


def test_what_is_under_way_is_waited_for_after_the_next_bucket_has_begun() -> None:
    told: list[str] = []
    turns = Turns()
    for name in "abc":
        turns.add(bucket(told, name, 1))
    turns.drain()
    assert told == ["a0", "b0", "wait a0", "a done", "c0", "wait b0", "b done", "wait c0", "c done"]


def test_buckets_of_several_exchanges_go_on_by_turns() -> None:
    told: list[str] = []
    turns = Turns()
    for name, exchanges in (("a", 2), ("b", 0), ("c", 2)):
        turns.add(bucket(told, name, exchanges))
    turns.drain()
    begun = [line for line in told if not line.startswith("wait")]
    assert begun == ["a0", "b done", "a1", "c0", "a done", "c1", "c done"]
    assert all(told.index(f"wait {name}") > told.index(name) for name in ("a0", "a1", "c0", "c1"))


def test_a_step_that_fails_gives_all_up() -> None:
    def fails() -> Iterator[Pending]:
        raise RuntimeError("a peer is lost")
        yield

    told: list[str] = []
    turns = Turns()
    turns.add(bucket(told, "a", 2))
    with pytest.raises(RuntimeError, match="a peer is lost"):
        turns.add(fails())
    turns.drain()
    assert told == ["a0"]
