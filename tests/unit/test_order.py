"""The order of samples: a permutation that only seed and epoch decide, and that is stored nowhere."""

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.data.order import Indices, Shuffle, epoch_seed, mix

SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 2**31)


def whole(size: int, seed: int = 0, epoch: int = 0) -> Indices:
    return Shuffle(size, seed, epoch)(np.arange(size))


def assert_permutation(order: Indices) -> None:
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(len(order)))


def test_every_sample_comes_exactly_once_in_small_datasets() -> None:
    for size in range(301):
        for epoch in range(3):
            assert_permutation(whole(size, seed=size, epoch=epoch))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(size=st.integers(1, 200_000) | st.sampled_from([4**8 - 1, 4**8, 4**8 + 1]), seed=SEEDS, epoch=EPOCHS)
def test_every_sample_comes_exactly_once_in_large_datasets(size: int, seed: int, epoch: int) -> None:
    assert_permutation(whole(size, seed, epoch))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(size=st.integers(2**40, 2**62), seed=SEEDS, epoch=EPOCHS, data=st.data())
def test_no_sample_comes_twice_in_datasets_that_no_memory_holds(
    size: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    positions = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=50))
    samples = Shuffle(size, seed, epoch)(np.array(sorted(positions)))
    assert len(set(samples.tolist())) == len(positions)
    assert samples.min() >= 0
    assert samples.max() < size


@settings(derandomize=True, deadline=None, max_examples=100)
@given(size=st.integers(1, 2000), seed=SEEDS, epoch=EPOCHS, data=st.data())
def test_any_positions_tell_the_same_as_the_whole(size: int, seed: int, epoch: int, data: st.DataObject) -> None:
    asked = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=20)), dtype=np.int64)
    before = asked.copy()
    assert np.array_equal(Shuffle(size, seed, epoch)(asked), whole(size, seed, epoch)[asked])
    assert np.array_equal(asked, before)


def in_whole_numbers(position: int, size: int, seed: int, epoch: int) -> int:
    """The same, written out: an order must stay what it is, as checkpoints are continued in it."""
    half = max(1, -(-(size - 1).bit_length() // 2))
    low, bits = (1 << half) - 1, (1 << 64) - 1
    value = position
    while True:
        left, right = value >> half, value & low
        for number in range(6):
            mixed = right ^ mix(epoch_seed(seed, epoch) + number)
            mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & bits
            mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & bits
            left, right = right, left ^ ((mixed ^ (mixed >> 31)) & low)
        value = left << half | right
        if value < size:
            return value


@settings(derandomize=True, deadline=None, max_examples=60)
@given(size=st.integers(1, 5000) | st.integers(2**40, 2**62), seed=SEEDS, epoch=EPOCHS, data=st.data())
def test_an_order_is_what_its_definition_says(size: int, seed: int, epoch: int, data: st.DataObject) -> None:
    asked = data.draw(st.lists(st.integers(0, size - 1), max_size=10))
    wanted = [in_whole_numbers(position, size, seed, epoch) for position in asked]
    assert Shuffle(size, seed, epoch)(np.array(asked, dtype=np.int64)).tolist() == wanted


def test_a_position_that_is_not_there_is_refused() -> None:
    for position in (-1, 5):
        with pytest.raises(IndexError, match=f"position {position} of 5"):
            Shuffle(5, 0, 0)(np.array([position]))


def test_seed_and_epoch_decide_the_order_and_do_not_stand_in_for_each_other() -> None:
    assert np.array_equal(whole(100, seed=3, epoch=5), whole(100, seed=3, epoch=5))
    orders = {whole(100, seed, epoch).tobytes() for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_a_trillion_samples_take_no_memory() -> None:
    positions = np.linspace(0, 10**12 - 1, 1000).astype(np.int64)
    tracemalloc.start()
    try:
        samples = Shuffle(10**12, seed=0, epoch=0)(positions)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(np.unique(samples)) == 1000
    assert peak_bytes < 1 << 20


@pytest.mark.parametrize("size", [2, 3, 10, 37])
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0], ids=["first", "middle", "last"])
def test_over_many_epochs_each_sample_is_as_likely_at_a_position(size: int, place: float) -> None:
    epochs, position = 1500, np.array([round(place * (size - 1))])
    drawn = np.concatenate([Shuffle(size, 0, epoch)(position) for epoch in range(epochs)])
    expected = epochs / size
    chi_squared = ((np.bincount(drawn, minlength=size) - expected) ** 2 / expected).sum()
    freedom = size - 1
    assert chi_squared < freedom + 8 * np.sqrt(2 * freedom)  # mean and deviation of chance


@pytest.mark.parametrize(("size", "orders"), [(2, 2), (3, 6), (4, 24)])
def test_every_order_of_a_few_samples_occurs(size: int, orders: int) -> None:
    assert len({whole(size, epoch=epoch).tobytes() for epoch in range(500)}) == orders


def test_few_samples_stay_where_they_were() -> None:
    moved = [whole(1000, epoch=epoch) for epoch in range(101)]
    in_place = np.mean([(order == np.arange(1000)).sum() for order in moved])
    kept = np.mean([(order == following).sum() for order, following in itertools.pairwise(moved)])
    assert 0.5 < in_place < 1.5  # a random permutation leaves one in place, on average
    assert 0.5 < kept < 1.5


@pytest.mark.parametrize("size", [5000, 4**7])
@pytest.mark.parametrize(
    ("one", "other"), [((0, 0), (0, 1)), ((0, 0), (1, 0)), ((7, 1), (7, 2)), ((1, 0), (0, 1))], ids=str
)
def test_neighbouring_epochs_and_seeds_are_uncorrelated(
    size: int, one: tuple[int, int], other: tuple[int, int]
) -> None:
    ours, theirs = whole(size, *one), whole(size, *other)
    for pair in (ours, theirs), (ours, np.arange(size)), (ours[:-1], ours[1:]):
        assert abs(np.corrcoef(*pair)[0, 1]) < 5 / np.sqrt(size)
