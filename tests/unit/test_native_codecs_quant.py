"""The native kernels of the codecs against plain torch, on every instruction set of this CPU."""

from __future__ import annotations

import codec_reference as reference
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from argosy import _native

ISAS = _native.instruction_sets()
pytestmark = pytest.mark.usefixtures("one_torch_thread")
BITS = [8, 4, 1]
FILLER = 0xAA  # around what is written, to see a write beyond it


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Any NaN is as good as another for the reference."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0).add(0.0), b.nan_to_num(0).add(0.0))


def encode(bits: int, values: Tensor, residual: Tensor, isa: str | None = None) -> tuple[Tensor, Tensor]:
    """The records of `values + residual`, and what is held back."""
    block, record = _native.quantised_record(bits)
    size = -(-values.numel() // block) * record
    records, left = torch.full((size + 128,), FILLER, dtype=torch.uint8), residual.clone()
    _native.quantise(bits, records.data_ptr() + 61, values.data_ptr(), left.data_ptr(), values.numel(), isa)
    assert bool((records[:61] == FILLER).all())
    assert bool((records[61 + size :] == FILLER).all())
    return records[61 : 61 + size].clone(), left


def decode(bits: int, sources: list[Tensor], count: int, onto: Tensor | None = None, isa: str | None = None) -> Tensor:
    out = torch.full((count + 16,), 7.0)
    if onto is not None:
        out[8 : 8 + count] = onto
    pointers = [source.data_ptr() for source in sources]
    _native.dequantise(bits, out.data_ptr() + 32, pointers, count, onto is not None, isa)
    assert bool((out[:8] == 7).all())
    assert bool((out[8 + count :] == 7).all())
    return out[8 : 8 + count].clone()


def numbers(count: int, seed: int, wild: float = 0.0) -> Tensor:
    """Numbers whose magnitudes differ from block to block; a part of them are any bits at all."""
    rng = torch.Generator().manual_seed(seed)
    plain = torch.randn(count, generator=rng) * torch.logspace(-6, 3, count)
    bits = torch.randint(0, 256, (count * 4,), dtype=torch.uint8, generator=rng).view(torch.float32)
    return torch.where(torch.rand(count, generator=rng) < wild, bits, plain)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([8, 4]),
    count=st.integers(1, 1500),
    seed=st.integers(0, 1000),
    wild=st.sampled_from([0, 0.002, 0.5]),
)
def test_integers_are_what_torch_makes_of_them(bits: int, count: int, seed: int, wild: float) -> None:
    values, residual = numbers(count, seed, wild), numbers(count, seed + 1) / 100
    total = values + residual
    for isa in ISAS:
        records, left = encode(bits, values, residual, isa)
        assert same_bits(decode(bits, [records], count, isa=isa), reference.quantise(total, bits)), isa
        assert same_bits(left, reference.held_back(total, bits)), isa


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 2500), seed=st.integers(0, 1000), wild=st.sampled_from([0, 0.001]))
def test_signs_are_what_torch_makes_of_them(count: int, seed: int, wild: float) -> None:
    values, residual = numbers(count, seed).nan_to_num(0, 0, 0), numbers(count, seed + 1) / 100
    if wild:
        values[seed % count] = (torch.nan, torch.inf, -torch.inf)[seed % 3]
    total = values + residual
    found = [(*encode(1, values, residual, isa), isa) for isa in ISAS]
    for records, left, isa in found:
        read = decode(1, [records], count, isa=isa)
        assert same_bits(read, reference.quantise(total, 1))
        assert same_bits(left, reference.held_back(total, 1))
        assert torch.equal(records, found[0][0])


@settings(max_examples=40, deadline=None)
@given(bits=st.sampled_from(BITS), count=st.integers(1, 1200), sources=st.integers(1, 4), add=st.booleans())
def test_sources_are_added_up_in_order_with_the_same_bits_everywhere(
    bits: int, count: int, sources: int, add: bool
) -> None:
    encoded = [encode(bits, numbers(count, seed, 0.001), torch.zeros(count))[0] for seed in range(sources)]
    onto = numbers(count, 99) if add else None
    expected = onto.clone() if onto is not None else torch.zeros(count)
    for source in encoded:
        expected = expected + decode(bits, [source], count)
    results = [decode(bits, encoded, count, onto, isa) for isa in ISAS]
    assert same_bits(results[0], expected)
    assert all(torch.equal(result.view(torch.int32), results[0].view(torch.int32)) for result in results)


@pytest.mark.parametrize("bits", BITS)
def test_zeros_stay_zeros_and_next_to_nothing_is_held_back(bits: int) -> None:
    records, left = encode(bits, torch.zeros(1000), torch.zeros(1000))
    assert not decode(bits, [records], 1000).any()
    assert not left.any()
    tiny = torch.full((1000,), 1e-42)
    records, left = encode(bits, tiny, torch.zeros(1000))
    assert torch.equal(decode(bits, [records], 1000) + left, tiny)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_seen_and_not_kept(bits: int, bad: float) -> None:
    block = reference.BLOCKS[bits]
    values = torch.ones(3 * block)
    values[block + 5] = bad
    records, left = encode(bits, values, torch.full((3 * block,), 0.25))
    read = decode(bits, [records], 3 * block).view(3, block)
    assert read[1].isnan().all()
    assert read[::2].isfinite().all()
    assert left.isfinite().all()
    assert not left.view(3, block)[1].any()


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), columns=st.integers(1, 40), rank=st.integers(1, 6), seed=st.integers(0, 1000))
def test_low_rank_products(rows: int, columns: int, rank: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    shape = (rows, columns, rank)
    values, before = torch.randn(2, rows, columns, generator=rng)
    start, sent_q, other_q = torch.randn(3, rank, columns, generator=rng)
    sent_p = torch.randn(rank, rows, generator=rng)
    weight = 0.5  # a power of two: exact, fused or not
    expected, results = before - sent_p.T @ sent_q + weight * values, []
    summed = start @ expected.T
    for isa in ISAS:
        matrix, settled, p, q = before.clone(), before.clone(), torch.empty(rank, rows), torch.empty(rank, columns)
        to, sent, others = (p.data_ptr(), matrix.data_ptr()), (sent_p.data_ptr(), sent_q.data_ptr()), values.data_ptr()
        _native.low_rank_project(*to, *sent, others, weight, start.data_ptr(), shape, isa)
        torch.testing.assert_close(matrix, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(p, summed, rtol=1e-4, atol=1e-3)
        _native.low_rank_settle(settled.data_ptr(), *sent, shape, isa)
        assert torch.equal(settled + weight * values, matrix)
        p = summed.clone()
        _native.low_rank_project_back(q.data_ptr(), matrix.data_ptr(), p.data_ptr(), shape, isa)
        ones = (p @ p.T).diagonal()
        assert ((ones - 1).abs() < 1e-5).logical_or(ones == 0).all()
        torch.testing.assert_close(p @ p.T, torch.diag(ones.round()), rtol=0, atol=1e-5)
        assert ones[0] > 0.5
        torch.testing.assert_close(q, p @ matrix, rtol=1e-4, atol=1e-4)
        out = torch.empty(rows, columns)
        _native.low_rank_expand(out.data_ptr(), p.data_ptr(), other_q.data_ptr(), shape, isa)
        torch.testing.assert_close(out, p.T @ other_q, rtol=1e-4, atol=1e-4)
        results.append((p, out, matrix, settled))
    for result in results[1:]:
        assert all(torch.equal(ours, first) for ours, first in zip(result, results[0], strict=True))


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="there are no codes of 3 bits: choose 8, 4 or 1"):
        _native.quantise(3, 8, 8, 8, 1)
    with pytest.raises(ValueError, match="this CPU cannot run isa 'mmx': choose one of"):
        _native.quantise(8, 8, 8, 8, 1, "mmx")
    with pytest.raises(ValueError, match="count is -1: it must be 0 or more"):
        _native.quantise(8, 8, 8, 8, -1)
    with pytest.raises(ValueError, match="an address is a null pointer"):
        _native.dequantise(8, 8, [0], 1)
    with pytest.raises(ValueError, match="sources is empty"):
        _native.dequantise(8, 8, [], 1)
    with pytest.raises(ValueError, match="shape is 0 x 4 of rank 1: each must be 1 or more"):
        _native.low_rank_project(8, 8, 8, 8, 8, 1.0, 8, (0, 4, 1))
