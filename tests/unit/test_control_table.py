"""The coordinator's data structures on their own: keys, barriers, and the budget of bytes in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from argosy.control.barriers import BarrierMismatchError, Barriers
from argosy.control.limits import SMALL_MESSAGE_BYTES, ByteBudget, Limits
from argosy.control.table import KEY_OVERHEAD_BYTES, Table, TableError, cost_bytes

pytestmark = pytest.mark.timeout(30)

KEYS = st.sampled_from(["a", "b", "ключ"])
VALUES = st.binary(max_size=40)


@contextmanager
def unless_full() -> Iterator[None]:
    try:
        yield
    except TableError as error:
        if error.kind != "full":
            raise


class TableAgainstDict(RuleBasedStateMachine):
    """Whatever is done to a table, it counts exactly the bytes it holds and never more than it may."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table(max_keys=3, max_bytes=3 * KEY_OVERHEAD_BYTES)
        self.model: dict[str, bytes] = {}
        self.reserved: list[tuple[str, bytes]] = []

    @rule(key=KEYS, value=VALUES)
    def set(self, key: str, value: bytes) -> None:
        with unless_full():
            self.table.set(key, value)
            self.model[key] = value

    @rule(key=KEYS, value=VALUES)
    def append(self, key: str, value: bytes) -> None:
        with unless_full():
            self.table.append(key, value)
            self.model[key] = self.model.get(key, b"") + value

    @rule(key=KEYS, expected=st.sampled_from([b"", b"1"]), desired=VALUES)
    def compare_set(self, key: str, expected: bytes, desired: bytes) -> None:
        current = self.model.get(key)
        with unless_full():
            result = self.table.compare_set(key, expected, desired)
            if current == expected or (current is None and not expected):
                self.model[key] = desired
                assert result == desired
            else:
                assert result == (expected if current is None else current)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        assert self.table.delete(key) == (self.model.pop(key, None) is not None)

    @rule(key=KEYS, value=VALUES)
    def reserve(self, key: str, value: bytes) -> None:
        with unless_full():
            self.table.reserve(key, value)
            self.reserved.append((key, value))

    @rule()
    def release_and_set(self) -> None:
        if self.reserved:
            key, value = self.reserved.pop()
            self.table.release(key, value)
            if key not in self.table:
                self.table.set(key, value)  # never raises: its room was kept
                self.model[key] = value

    @invariant()
    def counts(self) -> None:
        assert {key: self.table.get(key) for key in self.model} == self.model
        assert len(self.table) == len(self.model) <= 3
        held = [*self.model.items(), *self.reserved]
        assert self.table.used_bytes == sum(cost_bytes(key, value) for key, value in held)
        assert self.table.used_bytes <= 3 * KEY_OVERHEAD_BYTES


TestTableAgainstDict = TableAgainstDict.TestCase


def test_add_is_decimal_text() -> None:
    table = Table(10, 10_000)
    assert table.add("n", 5) == 5
    assert table.get("n") == b"5"
    assert table.add("n", -7) == -2
    table.set("n", b"40")
    assert table.add("n", 2) == 42
    for wrong in (b"", b"x", b"1_0", b" 1", b"1.0", b"9" * 30):
        table.set("n", wrong)
        with pytest.raises(TableError, match="'n' does not hold an integer"):
            table.add("n", 1)
        assert table.get("n") == wrong
    table.set("n", b"%d" % (2**63 - 1))
    with pytest.raises(TableError, match="64-bit"):
        table.add("n", 1)


def test_watches() -> None:
    async def scenario() -> None:
        table = Table(10, 10_000)
        table.set("here", b"")
        assert table.watch(["here"]).settled.done()
        assert table.watch([]).settled.done()
        watch = table.watch(["here", "a", "b", "a"])
        table.set("a", b"")
        table.delete("a")
        assert not watch.settled.done()
        table.set("b", b"")
        assert watch.settled.done()  # though "a" is gone again
        table.unwatch(watch)
        left = table.watch(["c", "d"])
        table.unwatch(left)
        assert not table._watches
        assert table._watched_bytes == 0
        table.set("c", b"")
        assert not left.settled.done()

    asyncio.run(scenario())


def test_watches_are_bounded_apart_from_values() -> None:
    async def scenario() -> None:
        table = Table(10, 1000)
        table.set("x", b"v" * 790)
        watches = [table.watch([str(index)]) for index in range(4)]
        with pytest.raises(TableError, match="waited for"):
            table.watch(["one more"])
        table.unwatch(watches.pop())
        table.unwatch(table.watch(["again"]))

    asyncio.run(scenario())


def test_barrier_generations() -> None:
    async def scenario() -> None:
        barriers = Barriers()
        for _ in range(3):
            first = barriers.arrive("b", 2, "rank 0")
            assert not first.released.done()
            second = barriers.arrive("b", 2, "rank 1")
            assert first.released.done()
            assert second.released.done()
            assert len(barriers) == 0
            barriers.withdraw(first)
        assert barriers.arrive("alone", 1, "").released.done()

    asyncio.run(scenario())


def test_barrier_withdrawal_and_mismatch() -> None:
    async def scenario() -> None:
        barriers = Barriers()
        first = barriers.arrive("b", 2, "rank 0")
        with pytest.raises(BarrierMismatchError, match="'b': rank 1 came for 3 participants, rank 0 for 2"):
            barriers.arrive("b", 3, "rank 1")
        barriers.withdraw(first)
        assert len(barriers) == 0
        arrivals = [barriers.arrive("b", 30, f"rank {rank}") for rank in range(20)]
        assert arrivals[0].describe().startswith("20 of 30 arrived (rank 0, rank 1, ")
        assert arrivals[0].describe().endswith("rank 15 and 4 more)")

    asyncio.run(scenario())


def test_budget_serves_in_turn() -> None:
    big = SMALL_MESSAGE_BYTES + 1

    async def scenario() -> None:
        budget = ByteBudget(2 * big)
        order: list[str] = []

        async def hold(name: str, size_bytes: int, gate: asyncio.Event) -> None:
            async with budget.hold(size_bytes):
                order.append(name)
                await gate.wait()

        def start(work: Awaitable[None]) -> asyncio.Task[None]:
            return asyncio.ensure_future(work)  # type: ignore[return-value]

        gates = [asyncio.Event() for _ in range(5)]
        first, second = start(hold("first", big, gates[0])), start(hold("second", big, gates[1]))
        await asyncio.sleep(0)
        whole = start(hold("whole", 2 * big, gates[2]))
        after = start(hold("after", big, gates[3]))
        small = start(hold("small", 10, gates[4]))
        for _ in range(5):
            await asyncio.sleep(0)
        assert order == ["first", "second", "small"]
        gates[0].set()
        await first
        assert order == ["first", "second", "small"]  # "after" would fit, but "whole" came first
        whole.cancel()
        await asyncio.wait({whole})
        await asyncio.sleep(0)
        assert order[-1] == "after"
        for gate in gates:
            gate.set()
        await asyncio.gather(second, after, small)
        assert budget._free_bytes == 2 * big
        assert not budget._queue

    asyncio.run(scenario())


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match=r"Limits.handshake_seconds must be more than 0, got -1"):
        Limits(handshake_seconds=-1)
    with pytest.raises(ValueError, match=r"Limits.max_inflight_bytes \(10\) must hold one message"):
        Limits(max_inflight_bytes=10)
