"""Batches by lease: those of one process, each trained once, whoever takes them and whoever breaks off."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from control_harness import Harbour, harbour
from loader_harness import UNEQUAL, Buckets, Keys
from torch.utils.data import DataLoader, IterableDataset

from argosy.control.lease_client import LeaseClient
from argosy.data.batches import BatchConfig
from argosy.data.cursor import Cursor
from argosy.data.leased import LeasedLoader
from argosy.data.loader import Loader
from argosy.data.progress import TELL_SECONDS

DATA = list(range(103))
CONFIG = BatchConfig(seed=7)


def script(**options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, **{"batch_size": 5, "shuffle": True} | options)


def one_process(epoch: int = 0, **options: Any) -> list[list[int]]:
    loader = Loader(script(**options), CONFIG, 1, 0, Cursor())
    loader.epoch = epoch
    return [batch.tolist() for batch in loader]


class Workers:
    """Loaders of several workers, each with a connection of its own to the coordinator."""

    def __init__(
        self, at: Harbour, stack: ExitStack, count: int, lease: int | None = None, sent: int = 1, **options: Any
    ) -> None:
        self.now = 0.0  # by the clock that says when queues are told
        self.clients = [LeaseClient(stack.enter_context(at.client(f"rank {rank}"))) for rank in range(count)]
        self.cursors = [Cursor(lambda: self.now) for _ in range(count)]
        self.settled: list[int] = []
        self.loaders = [
            LeasedLoader(
                script(**options),
                CONFIG,
                count,
                self.cursors[rank],
                self.clients[rank],
                "data",
                lambda rank=rank: self.settled.append(rank),
                lease,
                steps_sent=sent,
            )
            for rank in range(count)
        ]

    def epoch(self, pauses: list[float] | None = None) -> list[list[list[int]]]:
        """One epoch of all workers at once: by rank, its batches. `pauses` are the seconds of each one's step."""
        got: list[list[list[int]]] = [[] for _ in self.loaders]

        def work(rank: int) -> None:
            for batch in self.loaders[rank]:
                got[rank].append(batch.tolist())
                time.sleep(pauses[rank] if pauses else 0.0)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(self.loaders))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20.0)
        return got

    def counts(self, epoch: int = 0) -> Any:
        return self.clients[-1].ledger(f"data/{epoch}")["counts"]

    def train(self, batches: Iterator[Any], count: int, seconds: float = 0.0) -> list[list[int]]:
        """So many batches, with a step on each that takes as long."""
        got = []
        for _ in range(count):
            got.append(next(batches).tolist())
            self.cursors[0].steps += 1
            self.now += seconds
        return got


@contextmanager
def workers(count: int, **options: Any) -> Iterator[Workers]:
    with harbour() as at, ExitStack() as stack:
        yield Workers(at, stack, count, **options)


def together(batches: list[list[list[int]]]) -> list[list[int]]:
    return sorted(batch for each in batches for batch in each)


@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle": False}, {"drop_last": True}, {"batch_size": 1}, {"batch_size": 200}, {"num_workers": 1}],
    ids=str,
)
def test_the_batches_of_all_workers_are_those_of_one_process(options: dict[str, Any]) -> None:
    with workers(2, **options) as job:
        for epoch in range(2):
            assert together(job.epoch()) == sorted(one_process(epoch, **options))
            samples = 100 if options.get("drop_last") else 103
            assert job.counts(epoch) == [[0, samples, 1]]


def test_one_worker_takes_the_batches_of_one_process_in_their_order() -> None:
    with workers(1) as job:
        assert job.epoch() == [one_process()]


def test_a_faster_worker_takes_more() -> None:
    with workers(2) as job:
        quick, slow = job.epoch(pauses=[0.002, 0.05])
        assert len(quick) + len(slow) == 21
        assert len(slow) < 8 < len(quick)


@pytest.mark.parametrize("processes", [0, 2])
def test_who_breaks_off_leaves_the_rest_to_others(processes: int) -> None:
    with workers(2, num_workers=processes) as job:
        leaves = iter(job.loaders[0])
        next(leaves)
        leaves.close()
        rest = [batch.tolist() for batch in job.loaders[1]]
        assert sorted(rest) == sorted(one_process())  # the batch in hand too: there was no step on it
        assert job.counts() == [[0, 103, 1]]


@pytest.mark.parametrize("sent", [1, 3])
@pytest.mark.parametrize("processes", [0, 2])
def test_what_was_trained_before_a_break_is_not_trained_again(processes: int, sent: int) -> None:
    with workers(2, num_workers=processes, sent=sent) as job:
        leaves = iter(job.loaders[0])
        trained = job.train(leaves, 7)
        leaves.close()
        assert job.counts() == [[0, 35, 1], [35, 103, 0]]
        rest = [batch.tolist() for batch in job.loaders[1]]
        assert sorted(trained + rest) == sorted(one_process())
        assert job.counts() == [[0, 103, 1]]


def test_who_leaves_the_job_inside_a_loop_tells_what_was_trained() -> None:
    with workers(1) as job:
        held = iter(job.loaders[0])
        job.train(held, 2)
        assert job.counts() == [[0, 103, 0]]
        job.loaders[0].leave()
        assert job.counts() == [[0, 10, 1], [10, 103, 0]]


def test_what_a_lost_worker_has_told_is_not_trained_again() -> None:
    with workers(2) as job:
        lost = iter(job.loaders[0])
        trained = job.train(lost, 7, seconds=2 * TELL_SECONDS)  # the last one is in hand when it is lost
        threading.Timer(0.2, job.clients[0].close).start()
        rest = [batch.tolist() for batch in job.loaders[1]]
        assert sorted(trained[:6] + rest) == sorted(one_process())
        assert job.counts() == [[0, 103, 1]]


@pytest.mark.parametrize(
    ("sent", "seconds", "told"),
    [
        (1, 2 * TELL_SECONDS, [5, 10, 15, 20, 25]),
        (1, 0.4 * TELL_SECONDS, [0, 0, 15, 20, 20]),  # in between, and at the end of a range of 4 batches
        (1, 0.0, [0, 0, 0, 20, 20]),
        (3, 2 * TELL_SECONDS, [0, 0, 15, 15, 15]),  # three steps are sent together, in ranges of 6
    ],
)
def test_a_queue_is_told_now_and_then_inside_a_range(sent: int, seconds: float, told: list[int]) -> None:
    with workers(1, sent=sent) as job:
        batches, seen = iter(job.loaders[0]), []
        for _ in range(6):
            job.train(batches, 1, seconds)
            seen.append(job.counts())
        assert [counts[0][1] if counts[0][2] else 0 for counts in seen[1:]] == told


class Travelling:
    made = applied = 0


def test_a_queue_is_told_of_what_has_been_applied_where_steps_travel() -> None:
    travelling, settled = Travelling(), list[int]()
    with harbour() as at, at.client() as client:
        queues = LeaseClient(client)
        loader = LeasedLoader(
            script(),
            CONFIG,
            1,
            Cursor(),
            queues,
            "data",
            lambda: settled.append(1),
            10,
            steps_sent=2,
            travelling=travelling,
        )
        batches, seen = iter(loader), []
        for number in range(7):
            next(batches)
            seen.append(sum(end - begin for begin, end, times in queues.ledger("data/0")["counts"] if times))
            travelling.made = number + 1
            travelling.applied = (number + 1) // 2 * 2 - 2  # all but the last two
        assert seen == [0, 0, 0, 0, 10, 10, 20]
        assert not settled
        assert len(list(batches)) == 21 - 7
        assert settled == [1]
        assert queues.ledger("data/0")["counts"] == [[0, 103, 1]]


def test_an_error_of_a_loop_that_was_left_is_raised_by_the_next_one() -> None:
    errors = [RuntimeError("a push was refused")]

    def settle() -> None:
        if errors:
            raise errors.pop()

    with harbour() as at, at.client() as client:
        queues, cursor = LeaseClient(client), Cursor()
        loader = LeasedLoader(script(), CONFIG, 1, cursor, queues, "data", settle)
        for _ in loader:
            cursor.steps += 1
            break
        assert queues.ledger("data/0")["counts"] == [[0, 103, 0]]  # and is not taken for done
        with pytest.raises(RuntimeError, match="a push was refused"):
            list(loader)
        assert len(list(loader)) == 21


@pytest.mark.parametrize("processes", [0, 2])
def test_the_ranges_of_a_lost_worker_are_trained_by_others(processes: int) -> None:
    with workers(2, num_workers=processes) as job:
        lost = iter(job.loaders[0])
        for _ in range(6):
            next(lost)
        ended = threading.Timer(0.2, job.clients[0].close)
        ended.start()
        rest = [batch.tolist() for batch in job.loaders[1]]
        assert len(rest) == 21 - 4  # its first range of 4 batches was done
        assert job.clients[1].ledger("data/0")["counts"] == [[0, 103, 1]]


def test_a_range_is_done_when_it_is_settled_and_not_before() -> None:
    with workers(1, lease=10) as job:
        batches = iter(job.loaders[0])
        for _ in range(2):
            next(batches)
        assert job.settled == []
        assert job.counts() == [[0, 103, 0]]
        next(batches)
        assert job.settled == [0]
        assert job.counts() == [[0, 10, 1], [10, 103, 0]]


def test_a_range_whose_pushes_fail_is_not_done() -> None:
    def fails() -> None:
        raise RuntimeError("a push was refused")

    with harbour() as at, at.client() as client:
        queues = LeaseClient(client)
        loader = LeasedLoader(script(), CONFIG, 1, Cursor(), queues, "data", fails)
        with pytest.raises(RuntimeError, match="a push was refused"):
            list(loader)
        assert queues.ledger("data/0")["counts"] == [[0, 103, 0]]


def test_the_cursor_knows_the_batch_in_hand() -> None:
    with workers(1) as job:
        cursor, seen = job.cursors[0], []
        for batch in job.loaders[0]:
            at = cursor.at
            assert at is not None
            assert (at.samples, at.total, at.merged) == (len(batch),) * 3
            assert cursor.share(4) == 1.0  # its gradient is a step of its own
            seen.append((at.epoch, at.step, at.steps))
        assert seen == [(0, step, 21) for step in range(21)]
        assert cursor.at is None
        assert cursor.weight == 103


def test_lengths_are_told() -> None:
    with workers(2, lease=12) as job:
        loader = job.loaders[0]
        assert loader.arithmetic == (
            "batch 5, a step of its own; an epoch of 103 samples = 21 batches, which 2 workers take by lease, "
            "up to 3 at a time"
        )
        assert (len(loader), loader.steps_in(2), loader.batch_sizes, loader.global_batch) == (11, 42, (5, 5), 5)
        assert loader.outline() == job.loaders[1].outline()
        assert loader.dataset is DATA


def test_a_sampler_of_the_scripts_is_drawn_alike() -> None:
    with workers(2, sampler=Keys(DATA), shuffle=None) as job:
        assert together(job.epoch()) == sorted(one_process(sampler=Keys(DATA), shuffle=None))


def test_a_checkpoint_holds_whole_epochs() -> None:
    with workers(1) as job:
        loader = job.loaders[0]
        job.epoch()
        state = loader.state_dict()
        assert state == {"epoch": 1, "samples": 0}
        batches = iter(loader)
        next(batches)
        with pytest.raises(RuntimeError, match="cannot be saved inside its epoch"):
            loader.state_dict()
        loader.load_state_dict(state)
        assert loader.epoch == 1
        with pytest.raises(RuntimeError, match="saved 15 samples into epoch 1"):
            loader.load_state_dict({"epoch": 1, "samples": 15})


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(DATA)


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (DataLoader(Stream(), batch_size=5), "Stream is an IterableDataset"),
        (DataLoader(DATA, batch_sampler=Buckets(UNEQUAL)), "the script's Buckets, .* use ps=sync"),
    ],
)
def test_what_has_no_positions_is_refused(loader: DataLoader[Any], said: str) -> None:
    with harbour() as at, at.client() as client, pytest.raises(TypeError, match=said):
        LeasedLoader(loader, CONFIG, 2, Cursor(), LeaseClient(client), "data", lambda: None)
