"""Batches that begin small: every sample still once, the same for any number of workers, and resumed where it was."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_harness import Buckets, Job, flat
from torch.utils.data import DataLoader

from argosy.config import ConfigError
from argosy.data.batches import BatchConfig, arithmetic
from argosy.data.cursor import Cursor
from argosy.data.loader import Loader
from argosy.data.ramp import Ramp

RAMPS = st.sampled_from(["2:1epoch", "4:3epochs", "3:7", "5:20steps", "2:1"])


def sizes(job: Job, epochs: int) -> list[list[int]]:
    return [[len(step) for step in job.steps()] for _ in range(epochs)]


def test_a_ramp_in_epochs_rises_in_equal_steps_to_the_whole_batch() -> None:
    job = Job(2, lambda: DataLoader(range(48), 16), "global", ramp="4:3epochs")
    assert sizes(job, 4) == [[4] * 12, [8] * 6, [12] * 4, [16] * 3]


def test_a_ramp_may_rise_within_an_epoch() -> None:
    job = Job(1, lambda: DataLoader(range(30), 8), ramp="4:1epoch")
    assert sizes(job, 2) == [[2] * 5 + [4] * 3 + [6, 2], [8, 8, 8, 6]]


def test_a_ramp_in_steps_goes_on_across_epochs() -> None:
    job = Job(2, lambda: DataLoader(range(10), 4), "global", ramp="2:7steps")
    assert sizes(job, 3) == [[2] * 5, [2, 2, 4, 2], [4, 4, 2]]


def test_each_workers_batch_grows_where_batches_are_per_worker() -> None:
    job = Job(3, lambda: DataLoader(range(60), 4), ramp="2:1epoch")
    assert sizes(job, 2) == [[6] * 10, [12] * 5]
    assert {
        len(share) for shares in Job(3, lambda: DataLoader(range(60), 4), ramp="2:1epoch").shares() for share in shares
    } == {2}


def test_the_batches_of_a_step_are_of_one_size_and_the_ramp_counts_steps() -> None:
    config = BatchConfig(accumulate=3, ramp="4:6steps")
    loader = Loader(DataLoader(range(1000), 8), config, 1, 0, Cursor())
    batches = [len(batch) for batch in loader]
    assert batches[:24] == [2] * 6 + [4] * 6 + [6] * 6 + [8] * 6
    told = arithmetic(config, script_batch=8, workers=1, samples=1000, drop_last=False)
    assert told.endswith("batches of 6, 12, 18 for 2 steps each, then 24 (ramp=4:6steps)")


def test_a_ramp_with_accumulated_batches_goes_on_where_it_was() -> None:
    loader = Loader(DataLoader(range(40), 8), BatchConfig(accumulate=2, ramp="4:9steps"), 1, 0, Cursor())
    assert [[len(batch) for batch in loader] for _ in range(2)] == [[2] * 6 + [4] * 6 + [4], [6] * 4 + [8] * 2]
    ramp = Ramp.parse("4:9steps", accumulate=2)
    assert ramp is not None
    for epoch in range(2):
        whole = ramp.pieces(8, 40, False, epoch, 0)
        assert whole is not None
        for done in range(2, len(whole), 2):
            assert (ramp.pieces(8, 40, False, epoch, whole[done].begin) or whole[done:]) == whole[done:]


def test_an_incomplete_last_step_is_dropped_by_the_size_it_would_have() -> None:
    job = Job(1, lambda: DataLoader(range(10), 8, drop_last=True), ramp="2:1epoch")
    assert sizes(job, 2) == [[4, 4], [8]]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(ramp=RAMPS, world=st.integers(1, 4), samples=st.integers(1, 60), shuffle=st.booleans())
def test_every_sample_comes_once_and_steps_do_not_depend_on_the_workers(
    ramp: str, world: int, samples: int, shuffle: bool
) -> None:
    many = Job(world, lambda: DataLoader(range(samples), 20, shuffle), "global", ramp=ramp)
    one = Job(1, lambda: DataLoader(range(samples), 20, shuffle), "global", ramp=ramp)
    for epoch in range(4):
        expected = len(one.loaders[0])
        steps = many.steps()
        assert sorted(flat(steps)) == list(range(samples))
        assert steps == one.steps()
        assert len(steps) == expected, f"len() before epoch {epoch}"


@settings(derandomize=True, deadline=None, max_examples=40)
@given(ramp=RAMPS, epoch=st.integers(0, 3), stop=st.integers(1, 12), samples=st.integers(1, 50))
def test_a_run_that_is_resumed_in_an_epoch_takes_the_steps_that_were_left(
    ramp: str, epoch: int, stop: int, samples: int
) -> None:
    def loader() -> Loader:
        script: DataLoader[Any] = DataLoader(range(samples), 12, shuffle=True)
        return Loader(script, BatchConfig(ramp=ramp), workers=1, rank=0, cursor=Cursor())

    whole, broken, resumed = loader(), loader(), loader()
    for _ in range(epoch):
        assert list(map(len, whole)) == list(map(len, broken))
    steps = [batch.tolist() for batch in whole]
    taken = []
    for batch, _ in zip(broken, range(stop), strict=False):
        taken.append(batch.tolist())
        state = broken.state_dict()
    resumed.load_state_dict(state)
    if len(taken) < len(steps):
        assert len(resumed) == len(steps) - len(taken)
        taken += [batch.tolist() for batch in resumed]
    assert taken == steps


def test_the_loader_tells_how_large_its_steps_are() -> None:
    loader = Loader(DataLoader(range(10), 8), BatchConfig(ramp="2:1epoch"), workers=1, rank=0, cursor=Cursor())
    assert loader.batch_sizes == (8, 8)
    assert loader.steps_in(3) == 3 + 2 + 2
    assert loader.global_batch == 4
    assert [loader.global_batch for _ in loader] == [4, 4, 4], (
        "a step that is cut short by the epoch's end counts whole"
    )
    assert loader.global_batch == 8
    drawn = Loader(DataLoader(range(4), batch_sampler=Buckets([[0, 1], [2, 3]])), BatchConfig(), 1, 0, Cursor())
    assert drawn.batch_sizes is None
    assert drawn.global_batch is None


def test_the_sums_tell_the_ramp() -> None:
    told = arithmetic(BatchConfig(ramp="4:6epochs"), script_batch=64, workers=4, samples=1000, drop_last=False)
    assert told.endswith("; batches of 64, 128, 192 for 2 epochs each, then 256 (ramp=4:6epochs)")
    told = arithmetic(BatchConfig(ramp="16:100"), script_batch=64, workers=1, samples=1000, drop_last=False)
    assert told.endswith("; batches of 4, 8, ..., 60 for 6.667 steps each, then 64 (ramp=16:100)")


def test_a_ramp_that_cannot_be_is_refused_at_once() -> None:
    with pytest.raises(
        ConfigError, match=r"^ramp=8:3epochs: it begins with 1 .* 12 samples, too few for 3 workers; .* 4 parts"
    ):
        Job(3, lambda: DataLoader(range(60), 4), ramp="8:3epochs")
    with pytest.raises(ConfigError, match=r"^ramp=2:1epoch: batches come from the script's Buckets"):
        Job(1, lambda: DataLoader(range(4), batch_sampler=Buckets([[0, 1], [2, 3]])), ramp="2:1epoch")
