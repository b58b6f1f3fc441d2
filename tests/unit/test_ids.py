"""The kernels for ids on the client's side, against plain torch."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from argosy import _native

pytestmark = pytest.mark.usefixtures("one_torch_thread")
ISAS = _native.instruction_sets()


def read(address: int, count: int, kind: type[ctypes._SimpleCData]) -> list[int]:
    return list((kind * count).from_address(address)) if count else []


def check_distinct(distinct: _native.Distinct, ids: list[int]) -> None:
    given = torch.tensor(ids, dtype=torch.int64)
    found = distinct.find(given.data_ptr(), len(ids))
    wanted = list(dict.fromkeys(ids))
    assert read(distinct.ids_at, found, ctypes.c_int64) == wanted
    where = {id: place for place, id in enumerate(wanted)}
    assert read(distinct.places_at, len(ids), ctypes.c_uint32) == [where[id] for id in ids]
    counts = [0] * len(wanted)
    for id in ids:
        counts[where[id]] += 1
    assert read(distinct.counts_at, found, ctypes.c_uint32) == counts


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-4, 4) | st.integers(-(2**63), 2**63 - 1), max_size=80), min_size=1, max_size=3))
def test_distinct_ids(batches: list[list[int]]) -> None:
    distinct = _native.Distinct()
    for ids in batches:
        check_distinct(distinct, ids)


def test_distinct_ids_of_large_batches() -> None:
    generator = torch.Generator().manual_seed(1)
    distinct = _native.Distinct()
    for count, kinds in ((50_000, 100), (100_000, 2**62), (10, 3), (30_000, 20_000)):
        check_distinct(distinct, torch.randint(kinds, (count,), generator=generator).tolist())


def test_the_hash_spreads_ids_over_servers_and_shards_apart() -> None:
    counts = torch.zeros(4, 64)
    for id in range(-8000, 8000):
        hash = _native.mix(id % 2**64)
        counts[hash % 4, hash >> 58] += 1
    assert counts.min() > 25  # 62 each, give or take 8
    assert counts.max() < 105


def bags_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 9), max_size=30),
    st.sampled_from([1, 3, 8, 16, 19, 32, 64, 70]),
    st.booleans(),
    st.sampled_from(ISAS),
)
def test_rows_are_expanded_and_added_up(lengths: list[int], dim: int, mean: bool, isa: str) -> None:
    generator = torch.Generator().manual_seed(len(lengths))
    count, rows = sum(lengths), torch.randn(12, dim, generator=generator)
    places = torch.randint(12, (count,), generator=generator, dtype=torch.int32)
    index, offsets = places.long(), bags_of(lengths)
    out = torch.empty(count, dim)
    _native.expand(rows.data_ptr(), places.data_ptr(), count, dim, out.data_ptr(), isa)
    assert torch.equal(out, rows[index])

    gradients, sums = torch.randn(count, dim, generator=generator), torch.zeros(12, dim)
    _native.add_up(gradients.data_ptr(), max(count, 1), 0, places.data_ptr(), count, dim, sums.data_ptr(), isa)
    torch.testing.assert_close(sums, torch.zeros(12, dim).index_add(0, index, gradients))
    apart = torch.randn(count, dim + 5, generator=generator)
    _native.add_up(apart.data_ptr(), 1, dim + 5, places.data_ptr(), count, dim, sums.zero_().data_ptr(), isa)
    torch.testing.assert_close(sums, torch.zeros(12, dim).index_add(0, index, apart[:, :dim]))

    mode = "mean" if mean else "sum"
    rows.requires_grad_()
    bags = torch.nn.functional.embedding_bag(index, rows, offsets, mode=mode, include_last_offset=True)
    out = torch.full((len(lengths), dim), float("nan"))
    here = (places.data_ptr(), offsets.data_ptr(), len(lengths), dim, mean)
    _native.expand_bags(rows.data_ptr(), *here, out.data_ptr(), isa)
    torch.testing.assert_close(out, bags.detach())

    gradients = torch.randn(len(lengths), dim, generator=generator)
    sums = torch.zeros(12, dim)
    _native.add_up_bags(gradients.data_ptr(), *here, sums.data_ptr(), isa)
    bags.backward(gradients)
    torch.testing.assert_close(sums, rows.grad)
