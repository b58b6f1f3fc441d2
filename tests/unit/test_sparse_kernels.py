"""The native kernels of the sparse codecs against plain torch, on every instruction set of this CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sparse_reference import Rule, take, update
from torch import Tensor

from argosy import _native

ISAS = _native.instruction_sets()
pytestmark = pytest.mark.usefixtures("one_torch_thread")
NAN = float("nan")


def numbers(kind: str, count: int, seed: int) -> Tensor:
    """Gradients that are easy, and some that estimates of a threshold go wrong on."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, generator=generator)
    sampled = torch.arange(count) // 4 % (count // max(count // 100, 1024) | 1) == 0
    if kind == "equal":
        return torch.full((count,), 0.5)
    if kind == "few values":
        return normal.round()
    if kind == "heavy":
        return normal**9
    if kind == "rising":
        return normal.sort().values
    if kind == "nearly all zero":
        return normal * (torch.rand(count, generator=generator) < 0.001)
    if kind == "zero":
        return torch.zeros(count)
    if kind == "large where no sample is":
        return torch.where(sampled, 0.0, 1 + normal.abs())
    if kind == "large where samples are":
        return torch.where(sampled, 1.0, normal / 100)
    if kind == "tiny":
        return normal * 1e-42
    return normal


KINDS = ["normal", "equal", "few values", "heavy", "rising", "nearly all zero", "zero", "tiny"]
KINDS += ["large where no sample is", "large where samples are"]


def address(tensor: Tensor | None) -> int:
    return tensor.data_ptr() if tensor is not None else 0


def arguments(share: Tensor, velocity: Tensor | None, kept: Tensor | None, parameter: Tensor | None, rule: Rule):
    addresses = (address(share), address(velocity), address(kept), address(parameter))
    return (*addresses, share.numel(), rule.scale, rule.decay, rule.momentum, rule.nesterov)


def compress(
    share: Tensor,
    velocity: Tensor | None,
    kept: Tensor,
    parameter: Tensor | None = None,
    rule: Rule | None = None,
    k: int = 1,
    isa: str | None = None,
) -> tuple[int, Tensor, Tensor]:
    entries = _native.sparse_entries(share.numel(), k)
    values, gaps = torch.full((entries + 8,), NAN), torch.full((entries + 8,), -1, dtype=torch.int16)
    given = arguments(share, velocity, kept, parameter, rule or Rule())
    count = _native.sparse_compress(*given, k, address(values), address(gaps), isa)
    assert values[entries:].isnan().all(), "wrote behind the values"
    assert (gaps[entries:] == -1).all(), "wrote behind the gaps"
    return count, values[:entries], gaps[:entries]


def added(values: Tensor, gaps: Tensor, count: int) -> Tensor:
    out = torch.zeros(count)
    _native.sparse_add(address(out), count, address(values), address(gaps), values.numel())
    return out


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


cases = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(KINDS),
        "count": st.one_of(st.integers(1, 200), st.integers(1, 40_000)),
        "part": st.floats(0, 1),
        "momentum": st.sampled_from([None, "plain", "nesterov"]),
        "decays": st.booleans(),
        "isa": st.sampled_from(ISAS),
        "seed": st.integers(0, 1000),
        "broken": st.sampled_from([0, 0, 0, 1, 50]),
    }
)


@settings(max_examples=150, deadline=None)
@given(cases)
def test_what_is_largest_is_taken_out_and_masked(case: dict) -> None:
    count, seed = case["count"], case["seed"]
    k = min(max(round(case["part"] ** 4 * count), 1), count)
    share, kept = numbers(case["kind"], count, seed), numbers(case["kind"], count, seed + 1)
    if case["kind"] != "normal":
        kept.zero_()  # so that what is kept in the end is of that kind
    if case["broken"]:
        where = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: case["broken"]]
        share[where] = torch.tensor([NAN, float("inf"), float("-inf")])[where % 3]
    momentum = case["momentum"]
    velocity = numbers("normal", count, seed + 2) * (case["kind"] == "normal") if momentum else None
    parameter = numbers("normal", count, seed + 3) if case["decays"] else None
    rule = Rule(scale=0.5, decay=1e-3, momentum=0.9, nesterov=momentum == "nesterov")
    expected_kept, expected_velocity = kept.clone(), velocity.clone() if velocity is not None else None
    update(share, expected_velocity, expected_kept, parameter, rule)
    sent = take(expected_velocity, expected_kept, k)

    taken, values, gaps = compress(share, velocity, kept, parameter, rule, k, case["isa"])

    assert taken == len(sent) <= k
    assert same(kept, expected_kept)
    assert velocity is None or expected_velocity is None or same(velocity, expected_velocity)
    assert same(share, torch.zeros(count))
    total = torch.zeros(count)
    total[list(sent)] += torch.tensor(list(sent.values()))
    assert same(added(values, gaps, count), total)


@settings(max_examples=60, deadline=None)
@given(cases)
@example(
    {"kind": "normal", "count": 1, "part": 1, "momentum": None, "decays": False, "isa": ISAS[0], "seed": 0, "broken": 1}
)
def test_draining_moves_everything_and_keeps_finite_momentum(case: dict) -> None:
    count, seed = case["count"], case["seed"]
    share, kept = numbers(case["kind"], count, seed), numbers(case["kind"], count, seed + 1)
    share[: case["broken"]] = NAN
    momentum = case["momentum"]
    velocity = numbers("normal", count, seed + 2) if momentum else None
    parameter = numbers("normal", count, seed + 3) if case["decays"] else None
    rule = Rule(scale=0.5, decay=1e-3, momentum=0.9, nesterov=momentum == "nesterov")
    expected_kept, expected_velocity = kept.clone(), velocity.clone() if velocity is not None else None
    update(share, expected_velocity, expected_kept, parameter, rule)

    _native.sparse_drain(*arguments(share, velocity, kept, parameter, rule), case["isa"])

    torch.testing.assert_close(share, expected_kept, rtol=0, atol=0, equal_nan=True)
    assert same(kept, torch.zeros(count))
    if velocity is not None and expected_velocity is not None:
        assert same(velocity, expected_velocity.nan_to_num(0.0))


def test_draining_needs_nothing_kept() -> None:
    share, velocity = torch.tensor([1.0, 2.0, 3.0]), torch.ones(3)
    _native.sparse_drain(*arguments(share, velocity, None, None, Rule(momentum=0.5)))
    assert share.tolist() == velocity.tolist() == [1.5, 2.5, 3.5]


@pytest.mark.parametrize("places", [[0], [299_999], [0, 299_999], [65_535, 131_071, 131_072], [70_000, 299_000]])
@pytest.mark.parametrize("isa", ISAS)
def test_long_distances(places: list[int], isa: str) -> None:
    share = torch.zeros(300_000)
    share[places] = torch.arange(1.0, len(places) + 1)
    expected = share.clone()
    taken, values, gaps = compress(share, None, torch.zeros(300_000), k=max(len(places), 2), isa=isa)
    assert taken == len(places)
    assert torch.equal(added(values, gaps, 300_000), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_large_tensors_send_exactly_the_share(kind: str) -> None:
    share, kept = numbers(kind, 1_000_000, 3), torch.zeros(1_000_000)
    before = share.clone()
    taken, values, gaps = compress(share, None, kept, k=1000)
    assert taken == min(1000, int((before != 0).sum()))
    sent = added(values, gaps, 1_000_000)
    assert torch.equal(sent + kept, before)
    if taken == 1000:
        assert sent[sent != 0].abs().min() >= kept.abs().max()


def test_entries_of_another_tensor_are_refused() -> None:
    out, values, gaps = torch.zeros(10), torch.ones(2), torch.tensor([5, 5], dtype=torch.int16)
    with pytest.raises(ValueError, match="entry 1 is for element 10 of 10"):
        _native.sparse_add(address(out), 10, address(values), address(gaps), 2)


@pytest.mark.parametrize(("count", "k"), [(10, 0), (10, 11), (0, 0), (1 << 32, 1)])
def test_impossible_sizes_are_refused(count: int, k: int) -> None:
    with pytest.raises(ValueError, match="k must be from 1 to count"):
        _native.sparse_entries(count, k)


def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="isa 'abacus'"):
        compress(torch.ones(4), None, torch.zeros(4), isa="abacus")
