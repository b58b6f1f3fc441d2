"""The loader: every sample exactly once, in an order that does not depend on the number of workers."""

import collections
import copy
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from argosy.config import ConfigError
from argosy.data.batches import BatchConfig
from argosy.data.cursor import Cursor, Position
from argosy.data.loader import Loader

Mode = Literal["per-worker", "global"]
Make = Callable[[], DataLoader[Any]]
Steps = list[list[Any]]


def alone(script: DataLoader[Any], cursor: Cursor | None = None) -> Loader:
    return Loader(script, BatchConfig(), workers=1, rank=0, cursor=cursor or Cursor())


@contextmanager
def process_of(rank: int) -> Iterator[None]:
    """Random states as a worker's own process has them: unlike those of any other."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + rank)
        random.seed(1000 + rank)
        np.random.seed(1000 + rank)
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])


class Job:
    """The loaders of all workers, each with its own DataLoader and random state."""

    def __init__(self, world: int, make: Make, mode: Mode = "per-worker", seed: int = 0) -> None:
        self.loaders = []
        for rank in range(world):
            with process_of(rank):
                self.loaders.append(Loader(make(), BatchConfig(batch=mode, seed=seed), world, rank, Cursor()))

    def shares(self) -> list[list[Any]]:
        """One epoch: by rank, by step, what the worker is given."""
        shares = []
        for rank, loader in enumerate(self.loaders):
            with process_of(rank):
                shares.append(list(loader))
        return shares

    def steps(self) -> Steps:
        """One epoch: by step, the samples of all workers in the order of ranks."""
        return [[x for share in step for x in share.tolist()] for step in zip(*self.shares(), strict=True)]

    def set_epoch(self, epoch: int) -> None:
        for loader in self.loaders:
            loader.epoch = epoch


def flat(steps: Steps) -> list[Any]:
    return list(itertools.chain.from_iterable(steps))


# Every sample exactly once.


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    world=st.integers(1, 7),
    mode=st.sampled_from(["per-worker", "global"]),
    samples=st.integers(1, 40),
    batch=st.integers(1, 9),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_every_sample_comes_exactly_once(
    world: int, mode: Mode, samples: int, batch: int, shuffle: bool, drop_last: bool
) -> None:
    batch = max(batch, world) if mode == "global" else batch
    whole = batch if mode == "global" else batch * world
    job = Job(world, lambda: DataLoader(range(samples), batch, shuffle, drop_last=drop_last), mode)
    steps = job.steps()
    seen = flat(steps)
    assert len(set(seen)) == len(seen) == (samples - samples % whole if drop_last else samples)
    assert set(seen) <= set(range(samples))
    assert all(len(step) == whole for step in steps[:-1])
    assert {len(loader) for loader in job.loaders} == {len(steps)}


@settings(derandomize=True, deadline=None, max_examples=30)
@given(world=st.integers(2, 7), samples=st.integers(1, 60), batch=st.integers(7, 20), seed=st.integers(0, 2**63 - 1))
def test_the_steps_of_a_job_do_not_depend_on_its_workers(world: int, samples: int, batch: int, seed: int) -> None:
    def make(batch: int) -> Make:
        return lambda: DataLoader(range(samples), batch, shuffle=True)

    one = Job(1, make(batch), "global", seed)
    many = Job(world, make(batch), "global", seed)
    assert many.steps() == one.steps()
    assert many.steps() == one.steps(), "in the second epoch too"
    assert Job(world, make(batch), seed=seed).steps() == Job(1, make(batch * world), seed=seed).steps()


def test_a_loader_that_does_not_shuffle_gives_the_scripts_own_batches() -> None:
    script = DataLoader(TensorDataset(torch.arange(10.0), torch.arange(10)), batch_size=4)
    ours, plain = list(alone(script)), list(script)
    assert [[part.tolist() for part in batch] for batch in ours] == [[p.tolist() for p in batch] for batch in plain]
    assert Job(3, lambda: DataLoader(range(10), 4), "global").steps() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_loading_processes_change_nothing() -> None:
    def make(**options: Any) -> Make:
        return lambda: DataLoader(range(11), 2, shuffle=True, **options)

    plain, parallel = Job(2, make()), Job(2, make(num_workers=2, persistent_workers=True))
    assert [parallel.steps(), parallel.steps()] == [plain.steps(), plain.steps()]


def test_each_epoch_has_a_new_order() -> None:
    job = Job(2, lambda: DataLoader(range(50), 5, shuffle=True))
    orders = [tuple(flat(job.steps())) for _ in range(4)]
    assert len(set(orders)) == 4
    assert tuple(range(50)) not in orders
    assert {loader.epoch for loader in job.loaders} == {4}


def test_another_seed_is_another_order() -> None:
    orders = {
        tuple(flat(Job(1, lambda: DataLoader(range(50), 5, shuffle=True), seed=seed).steps())) for seed in range(4)
    }
    assert len(orders) == 4


def test_setting_the_epoch_continues_an_earlier_run() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(range(30), 4, shuffle=True)

    earlier = Job(2, make)
    orders = [earlier.steps() for _ in range(4)]
    later = Job(3, make)
    later.set_epoch(3)
    assert flat(later.steps()) == flat(orders[3])


def test_a_loaders_state_continues_on_any_number_of_workers() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(range(30), 8, shuffle=True)

    earlier, later = Job(2, make, "global"), Job(5, make, "global")
    earlier.steps()
    earlier.steps()
    for loader in later.loaders:
        loader.load_state_dict(earlier.loaders[0].state_dict())
    assert later.steps() == earlier.steps()
    assert later.steps() == earlier.steps()


# The script's own samplers.


class Keys(Sampler[Any]):
    """Yields keys that are no numbers."""

    def __init__(self, keys: list[Any]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[Any]:
        return (self.keys[number] for number in torch.randperm(len(self.keys)).tolist())

    def __len__(self) -> int:
        return len(self.keys)


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


class Buckets(Sampler[list[int]]):
    """Batches of samples that belong together, such as sentences of one length."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


EQUAL = [[0, 1], [2, 3], [4, 5], [6, 7]]
UNEQUAL = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9]]


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


# A worker without a share.


class Sample(NamedTuple):
    image: Tensor
    label: int


def nested(number: int) -> dict[str, Any]:
    return {
        "image": torch.full((3, 4), number),
        "pair": (number, 0.5),
        "name": f"n{number}",
        "sample": Sample(torch.ones(2), 1),
    }


def test_an_empty_share_is_an_empty_batch_of_the_right_shape() -> None:
    job = Job(4, lambda: DataLoader([nested(number) for number in range(5)], 1))
    first, *others = job.shares()
    assert first[1]["name"] == ["n4"]
    for full, empty in others:
        assert empty["name"] == []
        assert (empty["image"].shape, empty["image"].dtype) == ((0, 3, 4), full["image"].dtype)
        assert [(part.shape, part.dtype) for part in empty["pair"]] == [((0,), part.dtype) for part in full["pair"]]
        assert type(empty["sample"]) is Sample
        assert (empty["sample"].image.shape, empty["sample"].label.shape) == ((0, 2), (0,))


def last_share_of_two_workers(collate: Callable[[list[Any]], Any]) -> Any:
    """What the second worker is given in a step of one sample."""
    dataset = [(torch.ones(3, 2), number) for number in range(3)]
    return Job(2, lambda: DataLoader(dataset, 1, collate_fn=collate)).shares()[1][-1]


def test_a_batch_of_arrays_is_emptied() -> None:
    x, y = last_share_of_two_workers(lambda samples: tuple(map(np.stack, zip(*samples, strict=True))))
    assert (x.shape, y.shape) == ((0, 3, 2), (0,))


@pytest.mark.parametrize(
    ("collate", "empty"),
    [
        (lambda samples: [label for _, label in samples], []),
        (lambda samples: tuple(zip(*samples, strict=True)), ((), ())),
    ],
    ids=["list of samples", "lists of parts"],
)
def test_a_batch_of_lists_of_samples_is_emptied(collate: Callable[[list[Any]], Any], empty: Any) -> None:
    assert last_share_of_two_workers(collate) == empty


def test_what_is_not_of_a_sample_stays_in_an_empty_batch() -> None:
    fixed = {"mask": None, "task": "digits", "scale": 0.5, "width": 28}
    batch = last_share_of_two_workers(lambda samples: {"x": torch.stack([x for x, _ in samples]), **fixed})
    assert batch.pop("x").shape == (0, 3, 2)
    assert batch == fixed


@pytest.mark.parametrize("kind", [collections.OrderedDict, collections.UserDict])
def test_an_empty_batch_keeps_its_kind(kind: type[Any]) -> None:
    batch = last_share_of_two_workers(lambda samples: kind(x=torch.stack([x for x, _ in samples])))
    assert type(batch) is kind
    assert batch["x"].shape == (0, 3, 2)


def test_a_batch_that_cannot_be_emptied_is_refused_with_the_way_out() -> None:
    with pytest.raises(TypeError, match=r"type object .*drop_last=True"):
        last_share_of_two_workers(lambda samples: object())


# What cannot be divided.


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def distributed() -> DistributedSampler[int]:
    return DistributedSampler(range(10), num_replicas=2, rank=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataLoader(Stream(), 2), "Stream is an IterableDataset.*__getitem__ and __len__"),
        (lambda: DataLoader(range(10), batch_size=None), r"batch_size=None.*give it a batch_size"),
        (lambda: DataLoader(range(10), 2, sampler=distributed()), "without its DistributedSampler"),
        (
            lambda: DataLoader(range(10), batch_sampler=BatchSampler(distributed(), 2, False)),
            "without its DistributedSampler",
        ),
    ],
    ids=["stream", "no batches", "distributed", "distributed batches"],
)
def test_what_cannot_be_divided_is_refused(make: Make, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        alone(make())


def test_a_global_batch_smaller_than_the_job_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="batch of 2 cannot be divided among 3 workers"):
        Job(3, lambda: DataLoader(range(10), 2), "global")


# What the script sees of its own DataLoader.


def test_the_scripts_dataloader_is_still_there() -> None:
    dataset = list(range(10))
    loader = alone(DataLoader(dataset, 4, drop_last=True))
    assert loader.dataset is dataset
    assert (loader.batch_size, loader.drop_last, len(loader)) == (4, True, 2)
    with pytest.raises(AttributeError, match="no_such"):
        _ = loader.no_such


def test_a_loader_can_be_copied() -> None:
    loader = copy.copy(alone(DataLoader(range(10), 4)))
    assert (loader.batch_size, len(loader)) == (4, 3)


def test_the_sums_are_told() -> None:
    job = Job(4, lambda: DataLoader(range(20), 2))
    assert {loader.arithmetic for loader in job.loaders} == {
        "global batch 8 = 2 per worker x 4 data; an epoch of 20 samples = 2 steps of 8 + 1 of 4"
    }
    buckets = alone(DataLoader(range(10), batch_sampler=Buckets(UNEQUAL)))
    assert "Buckets, 4 steps" in buckets.arithmetic


# The cursor.


def test_the_cursor_is_at_the_batch_in_hand() -> None:
    cursor = Cursor()
    loader = Loader(DataLoader(range(5), 2), BatchConfig(), workers=2, rank=1, cursor=cursor)
    assert (cursor.at, cursor.weight, cursor.samples) == (None, 1.0, 1)
    for epoch in range(2):
        seen = [(cursor.at, cursor.weight, cursor.samples) for _ in loader]
        assert seen == [
            (Position(epoch, step=0, steps=2, samples=2, total=4), 2, 2),
            (Position(epoch, step=1, steps=2, samples=0, total=1), 0, 0),
        ]
        assert (cursor.at, cursor.samples) == (None, 1)
        assert cursor.weight == 2, "after a loop, a worker counts as the samples that it saw"


def test_loops_nest_and_breaking_out_restores_the_cursor() -> None:
    cursor = Cursor()
    train, check = alone(DataLoader(range(9), 4), cursor), alone(DataLoader(range(6), 3), cursor)
    for step, _ in enumerate(train):
        outside = cursor.at
        assert outside is not None
        assert (outside.step, cursor.weight) == (step, outside.samples)
        for _ in check:
            assert cursor.at is not outside
            assert cursor.weight == 3
            if step:
                break
        assert (cursor.at, cursor.samples) == (outside, outside.samples), "gradients are weighted by the outer batch"
        assert cursor.weight == outside.samples, "and so is a mean"
        if step == 1:
            break
    assert cursor.at is None
    assert cursor.weight == 8


def report_in_each_step(cursor: Cursor, then: Callable[[], Any]) -> None:
    for _ in alone(DataLoader(range(4), 2), cursor):
        cursor.loss = 0.5
        then()


def test_a_loss_reported_too_late_is_warned_about_where_it_happens() -> None:
    with pytest.warns(UserWarning, match="report it before") as caught:
        report_in_each_step(Cursor(), then=lambda: None)
    assert [warning.filename for warning in caught] == [__file__]


def test_a_loss_is_taken_once_and_without_a_warning() -> None:
    cursor, taken = Cursor(), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report_in_each_step(cursor, then=lambda: taken.extend([cursor.take_loss(), cursor.take_loss()]))
    assert taken == [0.5, None] * 2


# Random numbers.


def random_after(work: Callable[[], Any]) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        work()
        return torch.get_rng_state()


SCRIPTS: dict[str, Make] = {
    "in order": lambda: DataLoader(range(10), 3),
    "shuffled": lambda: DataLoader(range(10), 3, shuffle=True),
    "sampled": lambda: DataLoader(range(10), 3, sampler=Keys(list(range(10)))),
}


@pytest.mark.parametrize("make", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_making_a_loader_draws_no_random_numbers(make: Make) -> None:
    def look() -> None:
        loader = alone(make())
        loader.epoch = len(loader.arithmetic) + len(loader)
        len(loader)

    assert torch.equal(random_after(look), random_after(lambda: None))


@pytest.mark.parametrize("make", SCRIPTS.values(), ids=SCRIPTS.keys())
def test_an_epoch_draws_the_random_numbers_of_a_plain_loader_in_order(make: Make) -> None:
    """A DataLoader draws one seed for its processes. More would make the script's dropout differ from one process's."""
    plain = random_after(lambda: list(SCRIPTS["in order"]()))
    for workers, rank in (1, 0), (3, 0), (3, 2):
        loader = Loader(make(), BatchConfig(), workers, rank, Cursor())
        assert torch.equal(random_after(lambda loader=loader: list(loader)), plain)
