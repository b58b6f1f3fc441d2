"""The loader: every sample exactly once, in an order that does not depend on the number of workers."""

import copy
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_harness import UNEQUAL, Buckets, Job, Keys, Make, Mode, alone, flat
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)

from argosy.config import ConfigError
from argosy.data.batches import BatchConfig
from argosy.data.cursor import Cursor, Position
from argosy.data.loader import Loader

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


def test_a_loaders_state_does_not_continue_an_epoch_of_another_order() -> None:
    def make(samples: int, seed: int = 0) -> Loader:
        return Job(1, lambda: DataLoader(range(samples), 8, shuffle=True), seed=seed).loaders[0]

    earlier = make(96)
    handed = [each for _, batch in zip(range(6), earlier, strict=False) for each in batch.tolist()]
    state = earlier.state_dict()
    for other, here in ((make(96, seed=7), "seed=7, dataset=96"), (make(40), "seed=0, dataset=40")):
        with pytest.raises(
            ValueError, match=r"48 samples into an epoch \(seed=0, dataset=96\).*give the same data and"
        ):
            other.load_state_dict(state)
        with pytest.raises(ValueError, match=rf"here it has \({here}\)"):
            other.check_state_dict(state)
        assert (other.epoch, len(other)) == (0, len(make(96 if "96" in here else 40)))
        other.load_state_dict({**state, "samples": 0})  # between epochs nothing is lost
    same, older = make(96), make(96)
    same.load_state_dict(state)
    older.load_state_dict({"epoch": 0, "samples": 48})  # as checkpoints had it before
    for later in (same, older):
        assert sorted(handed + [each for batch in later for each in batch.tolist()]) == list(range(96))


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
            (Position(epoch, step=0, steps=2, samples=2, total=4, merged=4, is_even=True), 2, 2),
            (Position(epoch, step=1, steps=2, samples=0, total=1, merged=1), 0, 0),
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


class SlowAtFirst(Dataset[int]):
    """The first loading process takes long over its samples, so that batches overtake each other."""

    def __getitem__(self, index: int) -> int:
        if index < 4:
            time.sleep(0.3)
        return index

    def __len__(self) -> int:
        return 17


def test_batches_that_could_overtake_each_other_still_belong_to_their_shares() -> None:
    cursor = Cursor()
    script = DataLoader(SlowAtFirst(), 2, num_workers=2, in_order=False)
    with pytest.warns(UserWarning, match="in_order=False"):
        loader = alone(script, cursor)
    assert [(len(batch), int(cursor.samples)) for batch in loader] == [(2, 2)] * 8 + [(1, 1)]


def test_a_dataloader_with_an_iteration_of_its_own_is_refused() -> None:
    class Endless(DataLoader[Any]):
        def __iter__(self) -> Iterator[Any]:
            while True:
                yield from super().__iter__()

    with pytest.raises(TypeError, match="Endless has an __iter__ of its own"):
        alone(Endless(range(4)))
