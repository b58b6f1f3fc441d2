"""Balance: shares that follow speed, the same on all workers, and every sample exactly once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_harness import Buckets
from torch.utils.data import DataLoader

from argosy.config import ConfigError
from argosy.data.balance import Shares, divide
from argosy.data.batches import BatchConfig
from argosy.data.cursor import Cursor
from argosy.data.loader import Loader

DEADLINE_SECONDS = 30


@settings(derandomize=True, deadline=None, max_examples=300)
@given(samples=st.integers(0, 500), speeds=st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=12))
def test_parts_are_whole_complete_and_never_empty_without_need(samples: int, speeds: list[float]) -> None:
    sizes = divide(samples, speeds)
    assert sum(sizes) == samples
    assert min(sizes) >= (1 if samples >= len(speeds) else 0)
    for (size, speed), (other, other_speed) in itertools.permutations(zip(sizes, speeds, strict=True), 2):
        assert size >= other - 1 or speed <= other_speed, "who is faster has no smaller part"


def test_parts_are_in_proportion_to_speed() -> None:
    assert divide(64, [3.0, 1.0]) == [48, 16]
    assert divide(100, [1.0, 2.0, 5.0]) == [13, 25, 62]


def test_steps_that_were_divided_stay_as_they_were() -> None:
    shares = Shares([1.0, 1.0])
    assert shares.bounds(3, 8, rank=1) == (4, 8)
    shares.change(4, [3.0, 1.0])
    assert [shares.bounds(step, 8, rank=1) for step in (3, 4, 9)] == [(4, 8), (6, 8), (6, 8)]
    with pytest.raises(RuntimeError, match="from step 9 on, and step 9 is divided already"):
        shares.change(9, [1.0, 1.0])


class Job:
    """Workers in threads that meet in each step. Each has a clock that its own work and its waits move forward."""

    def __init__(self, costs: list[Callable[[int, int], float]], batch: int = 16, **options: Any) -> None:
        self.size, self.costs = len(costs), costs
        self.told: list[list[int]] = []
        self._barrier = threading.Barrier(self.size)
        self._numbers = [0.0] * self.size
        self.now = [0.0] * self.size
        self.exchanges = 0
        self.loaders: list[Loader] = []
        self.cursors = [Cursor(clock=lambda rank=rank: self.now[rank]) for rank in range(self.size)]
        samples = options.pop("samples", batch * self.size * 40 + 5)
        script = {"dataset": range(samples), "batch_size": batch, "shuffle": True}
        mode = options.pop("mode", "per-worker")
        for rank in range(self.size):
            own = {**script, "num_workers": options["num_workers"][rank]} if options else script
            told = self.told.append if rank == 0 else None
            config = BatchConfig(balance=True, batch=mode)
            exchange = lambda number, rank=rank: self.exchange(rank, number)  # noqa: E731
            self.loaders.append(Loader(DataLoader(**own), config, self.size, rank, self.cursors[rank], exchange, told))

    def exchange(self, rank: int, number: float) -> list[float]:
        self._numbers[rank] = number
        self._barrier.wait(DEADLINE_SECONDS)
        numbers = list(self._numbers)
        self.exchanges += rank == 0
        self._barrier.wait(DEADLINE_SECONDS)
        return numbers

    def epoch(self, meets: bool = True, stop: int | None = None) -> list[list[list[int]]]:
        """By step, by rank, what each worker was given."""
        with ThreadPoolExecutor(self.size) as pool:
            runs = [pool.submit(self._run, rank, meets, stop) for rank in range(self.size)]
            return [list(step) for step in zip(*(run.result(DEADLINE_SECONDS) for run in runs), strict=True)]

    def _run(self, rank: int, meets: bool, stop: int | None) -> list[list[int]]:
        given = []
        for step, samples in enumerate(self.loaders[rank]):
            given.append(samples.tolist())
            self.now[rank] += self.costs[rank](step, len(samples))
            if meets:
                with self.cursors[rank].waiting():
                    self.now[rank] = max(self.exchange(rank, self.now[rank]))
            if step + 1 == stop:
                break
        return given


def sizes(step: list[list[int]]) -> list[int]:
    return [len(share) for share in step]


def each(seconds: float, fixed: float = 0.0) -> Callable[[int, int], float]:
    return lambda _, samples: fixed + seconds * samples


@pytest.mark.parametrize("processes", [(0, 0), (2, 0)], ids=["no loading processes", "prefetching on one worker"])
def test_a_slow_worker_gets_less_and_every_sample_comes_once(processes: tuple[int, int]) -> None:
    job = Job([each(1.0), each(3.0)], num_workers=processes)
    steps = job.epoch()
    assert sizes(steps[0]) == [16, 16]
    assert sizes(steps[15]) == [24, 8], "3 : 1, as the speeds are"
    assert job.told == [[24, 8]]
    assert sorted(itertools.chain(*itertools.chain(*steps))) == list(range(32 * 40 + 5))
    assert {tuple(sizes(step)) for step in steps[:-1]} == {(16, 16), (24, 8)}
    assert {loader.arithmetic for loader in job.loaders} == {
        "global batch 32 = 24 + 8 per worker (by speed); an epoch of 1285 samples = 40 steps of 32 + 1 of 5"
    }
    assert sizes(job.epoch()[0]) == [24, 8], "the next epoch goes on with them"


def test_the_same_steps_are_trained_as_without_balance() -> None:
    job = Job([each(1.0), each(2.0), each(4.0)], mode="global", batch=28)
    plain = Loader(DataLoader(range(28 * 3 * 40 + 5), 28, shuffle=True), BatchConfig(), 1, 0, Cursor())
    assert [list(itertools.chain(*step)) for step in job.epoch()] == [batch.tolist() for batch in plain]
    assert job.told[-1] == [16, 8, 4]


def test_fixed_costs_are_balanced_too() -> None:
    """Seconds of 20 + n and 3 n for 64 samples are the same at 43 and 21."""
    job = Job([each(1.0, fixed=20.0), each(3.0)], batch=32)
    job.epoch()
    fast, slow = job.told[-1]
    assert 0.9 < (20 + fast) / (3 * slow) < 1.1


def test_small_differences_and_one_hiccup_change_nothing() -> None:
    def noisy(rank: int) -> Callable[[int, int], float]:
        return lambda step, samples: samples * (1 + 0.02 * ((step + rank) % 3)) + (500 if step == 7 and rank else 0)

    job = Job([noisy(0), noisy(1)])
    job.epoch()
    assert job.told == []
    assert 0 < job.exchanges - 41 <= 4, "and the workers ask each other less and less often"


def test_a_worker_that_becomes_slow_is_noticed() -> None:
    job = Job([each(1.0), each(1.0)])
    job.epoch()
    assert job.told == []
    job.costs[0] = each(4.0)
    job.epoch()
    assert job.told == [[6, 26]]


def test_an_epoch_continues_exactly_once_after_shares_have_changed() -> None:
    costs = [each(1.0), each(3.0)]
    first = Job(costs)
    before = first.epoch(stop=21)
    assert sizes(before[-1]) == [24, 8]
    state = first.loaders[0].state_dict()
    assert state == first.loaders[1].state_dict() == {"epoch": 0, "samples": 21 * 32, "seed": 0, "dataset": 1285}
    second = Job([*costs, each(2.0)], samples=1285)
    for loader in second.loaders:
        loader.load_state_dict(state)
    after = second.epoch()
    assert sorted(itertools.chain(*itertools.chain(*before), *itertools.chain(*after))) == list(range(1285))


def test_a_loop_in_which_workers_do_not_meet_exchanges_nothing() -> None:
    job = Job([each(1.0), each(3.0)])
    steps = job.epoch(meets=False)
    assert job.exchanges == 0
    assert {tuple(sizes(step)) for step in steps[:-1]} == {(16, 16)}


def test_whole_batches_of_the_script_are_not_balanced() -> None:
    script = DataLoader(range(10), batch_sampler=Buckets([[0, 1], [2, 3, 4]]))
    with pytest.raises(ConfigError, match=r"balance=true: the script's Buckets makes whole batches.*batch=global"):
        Loader(script, BatchConfig(balance=True), 2, 0, Cursor(), lambda number: [number] * 2)
    divided = BatchConfig(balance=True, batch="global")
    assert len(Loader(script, divided, 2, 0, Cursor(), lambda number: [number] * 2)) == 2


def test_balance_needs_a_way_to_exchange_speeds() -> None:
    with pytest.raises(TypeError, match="needs `exchange`"):
        Loader(DataLoader(range(10), 2), BatchConfig(balance=True), 2, 0, Cursor())
    assert len(list(Loader(DataLoader(range(10), 2), BatchConfig(balance=True), 1, 0, Cursor()))) == 5
