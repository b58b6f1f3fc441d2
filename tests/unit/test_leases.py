"""Queues of samples: every position is done exactly once, whoever is lost, and workers finish together."""

from __future__ import annotations

import random
import threading
from itertools import pairwise

import pytest
from control_harness import Harbour, eventually, harbour

from argosy.control.client import CoordinatorError, CoordinatorLost, DeadlineExceeded
from argosy.control.lease_client import LeaseClient
from argosy.control.leases import MAX_HELD, MAX_QUEUES, Holder, LeaseError, Leases, Ledger, Range, Shape
from argosy.control.past import Past


def counted(samples: int, ranges: list[Range]) -> list[int]:
    """How often each position was done, the plain way."""
    counts = [0] * samples
    for begin, end in ranges:
        for position in range(begin, end):
            counts[position] += 1
    return counts


@pytest.mark.parametrize("seed", range(20))
def test_the_ledger_counts_as_a_list_would(seed: int) -> None:
    draw = random.Random(seed)
    samples = draw.randrange(1, 40)
    ledger, ranges = Ledger(samples), []
    for _ in range(draw.randrange(30)):
        begin = draw.randrange(samples)
        ranges.append(Range(begin, draw.randrange(begin + 1, samples + 1)))
        ledger.add(ranges[-1])
    runs = ledger.counts()
    assert [times for begin, end, times in runs for _ in range(begin, end)] == counted(samples, ranges)
    assert all(left[2] != right[2] for left, right in pairwise(runs))  # as short as can be


@pytest.mark.parametrize("seed", range(20))
def test_every_position_is_done_once_whoever_goes(seed: int) -> None:
    draw = random.Random(seed)
    shape = Shape(draw.randrange(1, 500), draw.randrange(1, 20), draw.randrange(1, 80), draw.randrange(1, 6))
    leases, holders, done = Leases(), [Holder() for _ in range(shape.workers)], []
    leases.open("epoch", shape)
    while not leases.finished("epoch"):
        number = draw.randrange(shape.workers)
        if draw.random() < 0.1:
            leases.give_back(holders[number])
            holders[number] = Holder()
        taken = leases.take("epoch", holders[number])
        if taken is None or draw.random() < 0.5:
            for (name, _), held in list(holders[number].held.items()):
                batches = -(-(held.end - held.begin) // shape.batch)
                part = Range(held.begin, min(held.begin + draw.randint(1, batches) * shape.batch, held.end))
                done.append(part)
                leases.done(name, part, holders[number])
    assert counted(shape.samples, done) == [1] * shape.samples
    assert leases.summary("epoch")["counts"] == [(0, shape.samples, 1)]


def test_ranges_are_whole_batches_and_short_near_the_end() -> None:
    leases, holder = Leases(), Holder()
    leases.open("epoch", Shape(samples=1003, batch=10, largest=40, workers=4))
    ranges = []
    while (taken := leases.take("epoch", holder)) is not None:
        leases.done("epoch", taken, holder)
        ranges.append(taken)
    sizes = [end - begin for begin, end in ranges]
    assert ranges[0] == (0, 40)
    assert all(begin % 10 == 0 for begin, _ in ranges)
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True)
    assert sizes[-5:] == [10, 10, 10, 10, 3]
    assert set(sizes) == {40, 30, 20, 10, 3}


def test_only_the_holder_can_say_that_a_range_is_done() -> None:
    leases, mine, yours = Leases(), Holder(), Holder()
    leases.open("epoch", Shape(10, 5, 5, 1))
    taken = leases.take("epoch", mine)
    assert taken is not None
    with pytest.raises(LeaseError, match="does not hold the positions of 'epoch' from 0 to 5"):
        leases.done("epoch", taken, yours)
    leases.done("epoch", taken, mine)
    with pytest.raises(LeaseError, match="does not hold"):
        leases.done("epoch", taken, mine)


def test_what_is_not_done_of_a_range_returns() -> None:
    leases, mine, yours = Leases(), Holder(), Holder()
    leases.open("epoch", Shape(8, 2, 8, 1))
    assert leases.take("epoch", mine) == (0, 4)
    leases.done("epoch", Range(0, 2), mine)
    assert leases.summary("epoch")["counts"] == [(0, 2, 1), (2, 8, 0)]
    leases.give_back(mine)
    assert leases.take("epoch", yours) == (2, 4)
    leases.done("epoch", Range(2, 4), yours)
    assert leases.summary("epoch")["counts"] == [(0, 4, 1), (4, 8, 0)]


@pytest.mark.parametrize("done", [Range(0, 0), Range(0, 1), Range(0, 6), Range(2, 4), Range(0, -2)])
def test_only_whole_batches_from_the_beginning_of_a_range_can_be_done(done: Range) -> None:
    leases, holder = Leases(), Holder()
    leases.open("epoch", Shape(16, 2, 4, 1))
    assert leases.take("epoch", holder) == (0, 4)
    with pytest.raises(LeaseError, match=f"from {done.begin} to {done.end}"):
        leases.done("epoch", done, holder)
    assert leases.summary("epoch")["counts"] == [(0, 16, 0)]


def test_epochs_have_no_end() -> None:
    leases, holder = Leases(), Holder()
    epochs = MAX_QUEUES + 10
    for epoch in range(epochs):
        for loader in ("train", "test"):
            leases.open(f"{loader}/{epoch}", Shape(1, 1, 1, 2))
            taken = leases.take(f"{loader}/{epoch}", holder)
            assert taken is not None
            leases.done(f"{loader}/{epoch}", taken, holder)
    for epoch in (0, epochs - 1):  # one who comes late finds them done, as ever
        leases.open(f"train/{epoch}", Shape(1, 1, 1, 2))
        assert leases.take(f"train/{epoch}", Holder()) is None
        assert leases.finished(f"train/{epoch}")
    assert leases.summary(f"train/{epochs - 1}")["counts"] == [(0, 1, 1)]
    with pytest.raises(LeaseError, match="the ledger of 'train/0' is not kept any more"):
        leases.summary("train/0")
    assert leases.take("train/0", Holder()) is None


def test_so_many_queues_can_be_unfinished() -> None:
    leases = Leases()
    for epoch in range(MAX_QUEUES):
        leases.open(f"train/{epoch}", Shape(1, 1, 1, 1))
    with pytest.raises(LeaseError, match="its limit"):
        leases.open("one more", Shape(1, 1, 1, 1))


@pytest.mark.parametrize("seed", range(10))
def test_names_of_the_past_are_known_in_any_order(seed: int) -> None:
    draw, past, names = random.Random(seed), Past(), set()
    for _ in range(60):
        name = draw.choice(["a", "a/b/", "a/"]) + draw.choice(["", *map(str, range(12)), "07"])
        past.add(name)
        names.add(name)
    every = [stem + end for stem in ("a", "a/b/", "a/") for end in ("", *map(str, range(13)), "07")]
    assert {name for name in every if name in past} == names


def test_the_past_is_short() -> None:
    past = Past()
    for epoch in [*range(100, 200), *range(300, 250, -1), *range(200, 251)]:
        past.add(f"train/{epoch}")
    assert len(past) == 1


def test_a_connection_cannot_hold_everything() -> None:
    leases, holder = Leases(), Holder()
    leases.open("epoch", Shape(1000, 1, 1, 1))
    for _ in range(MAX_HELD):
        assert leases.take("epoch", holder) is not None
    with pytest.raises(LeaseError, match="the most that it may"):
        leases.take("epoch", holder)


# Over the wire.


def opened(at: Harbour, who: str, samples: int = 8) -> LeaseClient:
    client = LeaseClient(at.client(who))
    client.open("epoch", samples=samples, batch=4, largest=4, workers=2)
    return client


def test_workers_must_want_the_same() -> None:
    with harbour() as at:
        opened(at, "rank 0")
        with pytest.raises(CoordinatorError, match=r"queue 'epoch' has .*'samples': 8.* wants .*'samples': 9"):
            opened(at, "rank 1", samples=9)


def test_a_queue_that_nobody_opened_is_refused_and_the_connection_goes_on() -> None:
    with harbour() as at:
        client = LeaseClient(at.client())
        with pytest.raises(CoordinatorError, match="no queue of samples named 'other'"):
            client.take("other")
        with pytest.raises(CoordinatorError, match="no queue can have"):
            client.open("other", samples=8, batch=0, largest=4, workers=2)
        client.open("other", samples=0, batch=1, largest=4, workers=2)
        assert client.take("other") is None


def test_the_range_of_a_lost_connection_goes_to_one_who_waits() -> None:
    with harbour() as at:
        lost, stays = opened(at, "rank 0"), opened(at, "rank 1")
        assert lost.take("epoch") == (0, 4)
        last = stays.take("epoch")
        assert last == (4, 8)
        stays.done("epoch", last)
        assert stays.take_now("epoch") is None
        taken: list[Range | None] = []
        waiter = threading.Thread(target=lambda: taken.append(stays.take("epoch")))
        waiter.start()
        lost.close()
        waiter.join(timeout=10.0)
        assert taken == [(0, 4)]
        assert taken[0] is not None
        stays.done("epoch", taken[0])
        assert stays.take("epoch") is None
        ledger = stays.ledger("epoch")
        assert ledger == {"samples": 8, "counts": [[0, 8, 1]], "taken": 3, "returned": 1, "finished": True}
        with pytest.raises(CoordinatorLost, match="closed before lease_take"):
            lost.take("epoch")


def test_all_who_wait_learn_that_the_last_range_is_done() -> None:
    with harbour() as at:
        slow, others = opened(at, "rank 0", samples=4), [opened(at, f"rank {rank}", samples=4) for rank in (1, 2)]
        last = slow.take("epoch")
        assert last is not None
        told: list[Range | None] = []
        waiters = [threading.Thread(target=lambda each=each: told.append(each.take("epoch"))) for each in others]
        for waiter in waiters:
            waiter.start()
        eventually(lambda: at.ask(lambda: len(at.coordinator._leases._queues["epoch"].waiting) == 2))
        slow.done("epoch", last)
        for waiter in waiters:
            waiter.join(timeout=10.0)
        assert told == [None, None]


def test_what_is_given_back_is_for_others() -> None:
    with harbour() as at:
        one, other = opened(at, "rank 0", samples=4), opened(at, "rank 1", samples=4)
        assert one.take("epoch") == (0, 4)
        one.give_back("epoch")
        assert other.take("epoch") == (0, 4)
        with pytest.raises(CoordinatorError, match="does not hold"):
            one.done("epoch", Range(0, 4))


def test_a_wait_in_vain_names_who_holds_the_rest() -> None:
    with harbour() as at:
        slow, quick = opened(at, "rank 0", samples=4), opened(at, "rank 1", samples=4)
        slow.take("epoch")
        with pytest.raises(DeadlineExceeded, match=r"waited 0.05 s for samples of 'epoch': ranges are held by rank 0$"):
            quick.take("epoch", timeout_seconds=0.05)
