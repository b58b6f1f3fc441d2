"""Samplers of the script's own: all workers draw the same from them."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from loader_harness import UNEQUAL, Buckets, Job, Keys, Make, Mode, flat
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

# The script's own samplers.


class Drawn(Sampler[int]):
    """Shuffles in its own way."""

    def __init__(self, shuffle: Callable[[list[int]], None]) -> None:
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[int]:
        order = list(range(20))
        self.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 20


class OwnGenerator(Sampler[int]):
    """Has a generator of its own, which no two workers have in the same state."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.generator.manual_seed(random.getrandbits(32))

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(20, generator=self.generator).tolist())

    def __len__(self) -> int:
        return 20


class Told(OwnGenerator):
    """Is told the epoch, and shuffles by nothing else."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(20, generator=torch.Generator().manual_seed(self.epoch)).tolist())


SAMPLERS: dict[str, Callable[[], Sampler[int]]] = {
    "subset": lambda: SubsetRandomSampler(range(20)),
    "weighted": lambda: WeightedRandomSampler([1.0 + number for number in range(20)], 20, replacement=False),
    "own generator": OwnGenerator,
    "told the epoch": Told,
    "yields tensors": lambda: Drawn(lambda order: order.__setitem__(slice(None), torch.randperm(20).unbind())),
    "python's random": lambda: Drawn(random.shuffle),
    "numpy's random": lambda: Drawn(np.random.shuffle),
}


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS.keys())
def test_all_workers_draw_the_same_from_a_sampler(make: Callable[[], Sampler[int]]) -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(range(20), 3, sampler=make())

    job = Job(3, loader)
    first, second = job.steps(), job.steps()
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(20))
    assert first != second, "a new order each epoch"
    assert Job(3, loader).steps() == first, "seed and epoch decide it"
    assert flat(Job(1, loader).steps()) == flat(first), "the number of workers does not"


def test_workers_that_draw_differently_can_be_told_apart() -> None:
    def outlines(shuffle: Callable[[list[int]], None]) -> list[list[str]]:
        return [loader.outline() for loader in Job(2, lambda: DataLoader(range(20), 3, sampler=Drawn(shuffle))).loaders]

    same, different = outlines(random.shuffle), outlines(random.Random(0).shuffle)
    assert same[0] == same[1]
    assert different[0] != different[1], "one generator for both workers: the second draws on"


def test_a_sampler_that_repeats_samples_may_do_so() -> None:
    def make(weights: list[float]) -> Make:
        return lambda: DataLoader(range(4), 2, sampler=WeightedRandomSampler(weights, 40))

    assert flat(Job(3, make([0, 0, 1, 0])).steps()) == [2] * 40
    assert flat(Job(3, make([1, 1, 1, 1])).steps()) == flat(Job(1, make([1, 1, 1, 1])).steps())


def test_a_random_sampler_may_draw_a_part_of_the_dataset() -> None:
    job = Job(2, lambda: DataLoader(range(50), 4, sampler=RandomSampler(range(50), num_samples=10)))
    seen = flat(job.steps())
    assert len(set(seen)) == len(seen) == 10


@pytest.mark.parametrize("keys", [list("abcdefg"), [(number, "left") for number in range(7)]], ids=["text", "tuples"])
def test_a_sampler_may_yield_any_keys(keys: list[Any]) -> None:
    dataset: Any = {key: number for number, key in enumerate(keys)}
    job = Job(2, lambda: DataLoader(dataset, 2, sampler=Keys(keys)))
    assert sorted(flat(job.steps())) == list(range(7))


EQUAL = [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("batches", [EQUAL, UNEQUAL], ids=["equal", "unequal"])
def test_a_batch_sampler_gives_each_worker_one_of_its_batches(batches: list[list[int]]) -> None:
    job = Job(2, lambda: DataLoader(range(10), batch_sampler=Buckets(batches)))
    shares = job.shares()
    assert [[shares[rank][step].tolist() for rank in range(2)] for step in range(2)] == [batches[:2], batches[2:]]


def test_a_batch_sampler_makes_the_jobs_steps_when_batches_are_global() -> None:
    job = Job(3, lambda: DataLoader(range(10), batch_sampler=Buckets(UNEQUAL)), "global")
    assert job.steps() == UNEQUAL


@pytest.mark.parametrize("mode", ["per-worker", "global"])
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_batches_of_a_batch_sampler_come_exactly_once(world: int, mode: Mode) -> None:
    job = Job(world, lambda: DataLoader(range(10), batch_sampler=Buckets(UNEQUAL)), mode)
    assert flat(job.steps()) == list(range(10))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", [RandomSampler, SequentialSampler])
def test_a_plain_batch_sampler_is_as_good_as_a_batch_size(kind: type[Sampler[int]], drop_last: bool) -> None:
    job = Job(2, lambda: DataLoader(range(10), batch_sampler=BatchSampler(kind(range(10)), 4, drop_last)))
    assert len(set(flat(job.steps()))) == (8 if drop_last else 10)
