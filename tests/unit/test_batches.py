"""Batches: which samples make a step, what each worker holds of it, and the sums as they are told."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.config import ConfigError
from argosy.data.batches import BatchConfig, Consecutive, Epoch, arithmetic, share_bounds
from argosy.data.order import Indices, Shuffle

WORKERS = st.integers(1, 40)
CONFIGS = st.sampled_from([BatchConfig(), BatchConfig(batch="global")])


def in_order(positions: Indices) -> Indices:
    return positions


@settings(derandomize=True, deadline=None, max_examples=200)
@given(samples=st.integers(0, 10**6), workers=WORKERS)
def test_shares_are_contiguous_complete_and_as_equal_as_can_be(samples: int, workers: int) -> None:
    bounds = [share_bounds(samples, workers, rank) for rank in range(workers)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == samples
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(bounds))
    sizes = [end - begin for begin, end in bounds]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True), "lower ranks hold one more"


@settings(derandomize=True, deadline=None)
@given(batch=st.integers(1, 1000), workers=WORKERS)
def test_a_batch_is_each_workers_or_the_whole_jobs(batch: int, workers: int) -> None:
    assert BatchConfig(batch="per-worker").global_batch(batch, workers) == batch * workers
    if batch >= workers:
        assert BatchConfig(batch="global").global_batch(batch, workers) == batch


def test_a_global_batch_that_leaves_workers_without_a_sample_is_refused() -> None:
    assert BatchConfig(batch="global").global_batch(4, workers=4) == 4
    with pytest.raises(ConfigError, match=r"^batch=global: ") as caught:
        BatchConfig(batch="global").global_batch(3, workers=4)
    for words in ("batch of 3", "4 workers", "at most 3 workers", "batch=per-worker"):
        assert words in caught.value.fix


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_fits_64_bits(seed: int) -> None:
    assert BatchConfig(seed=2**63 - 1).seed == 2**63 - 1
    with pytest.raises(ConfigError, match=f"^seed={seed}: "):
        BatchConfig(seed=seed)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(samples=st.integers(0, 300), batch=st.integers(1, 40), drop_last=st.booleans())
def test_steps_are_consecutive_parts_of_the_order(samples: int, batch: int, drop_last: bool) -> None:
    order = Shuffle(max(samples, 1), seed=1, epoch=2)
    steps = list(Consecutive(order, samples, batch, drop_last))
    kept = samples - samples % batch if drop_last else samples
    assert [sample for step in steps for sample in step] == order(np.arange(kept)).tolist()
    assert all(len(step) == batch for step in steps[: samples // batch])
    assert len(steps) == len(Consecutive(order, samples, batch, drop_last))
    assert all(type(sample) is int for step in steps for sample in step), "datasets are indexed with plain numbers"


@settings(derandomize=True, deadline=None, max_examples=100)
@given(samples=st.integers(0, 100), batch=st.integers(1, 20), workers=WORKERS)
def test_the_workers_shares_in_the_order_of_ranks_are_the_step(samples: int, batch: int, workers: int) -> None:
    steps = Consecutive(in_order, samples, batch, drop_last=False)
    shares = [list(Epoch(steps, workers, rank)) for rank in range(workers)]
    assert all(len(Epoch(steps, workers, rank)) == len(steps) == len(shares[rank]) for rank in range(workers))
    for number, step in enumerate(steps):
        assert [sample for mine in shares for sample in mine[number].indices] == step
        assert all(mine[number].step == step for mine in shares)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    config=CONFIGS, workers=st.integers(1, 9), batch=st.integers(9, 30), samples=st.integers(1, 200), drop=st.booleans()
)
def test_the_told_sums_are_true(config: BatchConfig, workers: int, batch: int, samples: int, drop: bool) -> None:
    text = arithmetic(config, batch, workers, samples, drop)
    total = config.global_batch(batch, workers)
    steps = [len(step) for step in Consecutive(in_order, samples, total, drop)]
    shares = [end - begin for begin, end in (share_bounds(total, workers, rank) for rank in range(workers))]

    told = re.fullmatch(
        r"global batch (\d+) = (?:(\d+) per worker x (\d+) data|([\d +]+) per worker)( \(batch=global\))?; "
        r"an epoch of (\d+) samples = (.+)",
        text,
    )
    assert told, text
    told_total, each, times, unequal, told_global, told_samples, told_steps = told.groups()
    assert int(told_total) == total
    assert (list(map(int, unequal.split(" + "))) if unequal else [int(each)] * int(times)) == shares
    assert bool(told_global) == (config.batch == "global")
    assert int(told_samples) == samples

    full = re.search(r"(\d+) steps? of (\d+)", told_steps)
    last = re.search(r"\b1 of (\d+)", told_steps)
    dropped = re.search(r"(\d+) dropped \(drop_last\)", told_steps)
    counted = [int(full[2])] * int(full[1]) if full else []
    assert counted + ([int(last[1])] if last else []) == steps
    assert (int(dropped[1]) if dropped else 0) == samples - sum(steps)


def test_one_step_is_not_told_as_steps() -> None:
    assert arithmetic(BatchConfig(), 10, workers=1, samples=10, drop_last=False).endswith("= 1 step of 10")


def test_an_epoch_without_samples_has_sums_too() -> None:
    assert arithmetic(BatchConfig(), 10, workers=2, samples=0, drop_last=False).endswith("= 0 steps")
