"""A push of what was pulled last goes where the pull has found the rows: whatever happened since, it does the same.

Compared is a table with one like it that nobody pulls from, and that finds its rows by its index. A request that is
alone in its table goes another way than one that others may meet there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from table_reference import Rows
from torch import Tensor

from argosy import _native
from argosy.ps import Adagrad, table_config

pytestmark = pytest.mark.usefixtures("one_torch_thread")
DIM, ROWS, BATCH = 64, 120_000, 20_000  # large enough for trails: a batch in two pieces
CONFIG = table_config(DIM, Adagrad(0.1), "uniform:0.01")


def ids_of(seed: int, count: int) -> Tensor:
    ids = torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(seed))
    ids[: count // 2] = torch.arange(count // 2)
    return ids[torch.randperm(count, generator=torch.Generator().manual_seed(seed))]


class Pair:
    """A table that is pulled from, and one that is not."""

    def __init__(self, first: Tensor | None = None) -> None:
        """`first` are the ids that get rows first."""
        self.pulled, self.plain = Rows(CONFIG), Rows(CONFIG)
        if first is not None:
            self.push(first, 1)
        self.ids = ids_of(0, ROWS)
        self.push(self.ids, 0)

    def push(self, ids: Tensor, seed: int) -> None:
        gradients = torch.randn(len(ids), DIM, generator=torch.Generator().manual_seed(seed))
        assert self.pulled.push(ids, gradients) == self.plain.push(ids, gradients)

    def both(self, work: Callable[[Rows], object]) -> None:
        assert work(self.pulled) == work(self.plain)

    def check(self) -> None:
        for one, other in zip(everything(self.pulled), everything(self.plain), strict=True):
            assert torch.equal(one, other)


@pytest.fixture(params=[False, True], ids=["alone", "in company"])
def pairs(request: pytest.FixtureRequest) -> Iterator[Callable[..., Pair]]:
    """Makes pairs; in company, somebody looks at the first table nearly all the time."""
    over, company = threading.Event(), list[threading.Thread]()

    def look(table: Rows) -> None:
        few, out = torch.arange(255), torch.empty(255, DIM)  # of so few, no trail is kept
        while not over.is_set():
            table.native.pull(few.data_ptr(), len(few), out.data_ptr())

    def make(first: Tensor | None = None) -> Pair:
        pair = Pair(first)
        if request.param:
            company.append(threading.Thread(target=look, args=(pair.pulled,)))
            company[-1].start()
        return pair

    yield make
    over.set()
    for thread in company:
        thread.join(60)


def everything(table: Rows) -> list[Tensor]:
    """Ids, values, states and counters, by id."""
    count = table.native.rows
    parts = [torch.empty(count, dtype=torch.int64), *(torch.empty(count, width) for width in (DIM, DIM, 2))]
    following, found = table.native.scan(0, count, *(part.data_ptr() for part in parts))
    assert (following, found) == (0, count)
    order = parts[0].argsort()
    return [part[order] for part in parts]


def test_a_push_follows_the_pull_of_its_ids(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    batch = pair.ids[:BATCH]
    for step in range(3):
        pair.pulled.pull(batch)
        pair.push(batch, step)
        pair.push(batch, step)  # nobody has pulled for this one
    assert pair.pulled.native.followed == 3
    assert pair.plain.native.followed == 0
    pair.check()


def test_pulls_may_be_ahead_of_their_pushes(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    batches = pair.ids.split(BATCH)
    pair.pulled.pull(batches[0])
    for number in range(5):
        pair.pulled.pull(batches[number + 1])
        pair.push(batches[number], number)
    assert pair.pulled.native.followed == 5
    pair.check()


def test_ids_of_a_push_that_only_look_like_those_of_a_pull(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    pulled = pair.ids[:BATCH]
    for at in (1, BATCH // 2, BATCH - 2):  # in the first piece, and in the second
        pushed = pulled.clone()
        pushed[at] = pair.ids[BATCH + at]
        pair.pulled.pull(pulled)
        pair.push(pushed, at)
        pair.pulled.pull(pulled)
        pair.push(torch.cat([pulled[:1], pulled[1:-1].flip(0), pulled[-1:]]), at)
        pair.pulled.pull(pulled)
        pair.push(pulled[: BATCH // 2], at)
    pair.check()


def test_rows_that_are_made_between_pull_and_push(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    new = ids_of(7, 2 * BATCH)[torch.arange(2 * BATCH) % 3 > 0]
    pair.pulled.pull(new[:BATCH])
    pair.push(new[5:BATCH:2], 1)
    pair.push(new[:BATCH], 2)
    assert pair.pulled.native.followed == 1
    pair.check()


def test_rows_that_are_removed_between_pull_and_push_and_their_places_taken(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    batch = pair.ids[:BATCH]
    others = ids_of(8, BATCH)[::2] * 3 + 1
    for step, taken in enumerate((others[:0], others)):
        pair.pulled.pull(batch)
        pair.both(lambda table: table.native.end_day(1.0))
        pair.push(pair.ids[1::2], step)
        pair.both(lambda table: table.native.shrink(0, unseen_days=1))
        if len(taken):
            pair.push(taken, step)
        pair.push(batch, step)
        assert pair.pulled.native.followed == step + 1
        pair.check()


def test_a_free_row_that_looks_as_if_it_had_the_id(pairs: Callable[..., Pair]) -> None:
    """It has the number of the row that was freed before it: here the very id that it had."""
    shard = [id for id in range(200_000, 300_000) if _native.mix(id) >> 58 == 0]
    wanted = next(id for id in range(100, 1000) if _native.mix(id) >> 58 == 0)
    before, other = shard[:wanted], shard[wanted]
    pair = pairs(torch.tensor([*before, other, wanted]))  # in rows 0 to wanted + 1 of their shard
    batch = torch.cat([torch.tensor([wanted]), pair.ids[pair.ids != wanted][:BATCH]])
    pair.pulled.pull(batch)
    pair.both(lambda table: table.native.end_day(1.0))
    pair.push(pair.ids[pair.ids != wanted], 2)
    pair.push(torch.tensor(before), 3)
    pair.both(lambda table: table.native.shrink(0, unseen_days=1))
    pair.push(batch, 4)
    assert pair.pulled.native.followed == 1
    pair.check()


def test_what_is_only_looked_at_costs_little_memory(pairs: Callable[..., Pair]) -> None:
    pair = pairs()
    payload = pair.plain.native.payload_bytes
    for begin in range(0, ROWS - BATCH, 300):
        many, few = pair.ids[begin : begin + BATCH], pair.ids[begin : begin + 256 + begin % 1000]
        pair.pulled.pull(many)
        if begin % 900 == 0:
            pair.push(many, begin)
        pair.pulled.pull(few)
        assert pair.pulled.native.bytes <= pair.plain.native.bytes + payload / 16 + (1 << 20)
    assert pair.pulled.native.bytes <= 1.3 * payload
    pair.check()


def test_many_threads_pull_and_push() -> None:
    table = Rows(table_config(DIM, None))
    ids = ids_of(0, ROWS)
    table.push(ids, torch.zeros(ROWS, DIM))

    def work(thread: int) -> None:
        batch = ids[thread * BATCH : (thread + 2) * BATCH]
        for _ in range(10):
            table.pull(batch)
            table.push(batch, torch.ones(len(batch), DIM))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert table.native.followed > 0
    counts = torch.cat([torch.full((BATCH,), float(many)) for many in (10, 20, 20, 20, 10, 0)])
    assert torch.equal(table.pull(ids), counts[:, None].expand(-1, DIM))
