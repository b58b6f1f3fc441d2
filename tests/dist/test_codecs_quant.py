"""The codecs that are not sparse, between real ranks: against exact sums, and against plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import codec_reference as reference
import numpy as np
import pytest
import torch
from ranks import Place, run
from torch import Tensor

from argosy.comm.engine import EngineGroup
from argosy.comm.group import SoloGroup
from argosy.compress.codec import Bucket, Codec, Part
from argosy.compress.half import HalfCodec
from argosy.compress.powersgd import PowerSgdCodec
from argosy.compress.quantised import QuantisedCodec
from argosy.compress.sign import SignCodec

CODECS: dict[str, Callable[[], Codec]] = {
    "fp16": lambda: HalfCodec("fp16"),
    "bf16": lambda: HalfCodec("bf16"),
    "int8": lambda: QuantisedCodec(bits=8),
    "int4": lambda: QuantisedCodec(bits=4),
    "sign": SignCodec,
    "powersgd": lambda: PowerSgdCodec(rank=2, min_elements=1),
}
KEEPING = ["int8", "int4", "sign", "powersgd"]  # those with error feedback
# What one step may lose of a gradient, and the bytes that it may take, as parts of the whole.
LOSSES = {"fp16": 1e-3, "bf16": 6e-3, "int8": 0.015, "int4": 0.2, "sign": 0.75, "powersgd": 1e-4}
BYTES = {"fp16": 0.51, "bf16": 0.51, "int8": 0.27, "int4": 0.15, "sign": 0.04, "powersgd": 0.08}
SHAPES = {"first.weight": (90, 70), "first.bias": (70,), "conv": (64, 16, 3, 3), "scalar": (), "last": (1001,)}


def bucket_of(names: list[str], group: EngineGroup | None = None) -> Bucket:
    parts, end = [], 0
    for name in names:
        begin, end = end, end + math.prod(SHAPES[name])
        parts.append(Part(name, SHAPES[name], begin, end))
    return Bucket(group.empty(end) if group is not None else torch.zeros(end), tuple(parts))


def gradient(bucket: Bucket, seed: int, rank: int) -> Tensor:
    """Of rank 2 where it is a matrix, the same space for all, so that PowerSGD can have all of it."""
    flat = torch.empty(bucket.flat.numel())
    for number, part in enumerate(bucket.parts):
        space = torch.Generator().manual_seed(1000 * seed + number)
        own = torch.Generator().manual_seed(1000 * seed + 100 * rank + number + 1)
        rows = part.shape[0] if len(part.shape) > 1 else part.end - part.begin
        basis = torch.randn(rows, 2, generator=space)
        values = basis @ torch.randn(2, (part.end - part.begin) // rows, generator=own)
        flat[part.begin : part.end] = values.flatten() * 10.0 ** (-number)
    return flat


def reduced(codec: Codec, bucket: Bucket, values: Tensor, group: EngineGroup) -> Tensor:
    """The sum as the codec makes it; checked to have the same bits on all ranks."""
    bucket.flat.copy_(values)
    codec.reduce(bucket, group)
    for other in group.all_gather(bucket.flat):
        assert torch.equal(other.view(torch.int32), bucket.flat.view(torch.int32))
    return bucket.flat.clone()


def total(values: Tensor, group: EngineGroup) -> Tensor:
    return torch.stack([part.double() for part in group.all_gather(values)]).sum(0)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def check_one_step(name: str, group: EngineGroup) -> None:
    codec, bucket = CODECS[name](), bucket_of(["first.weight", "conv"], group)
    values = gradient(bucket, 1, group.rank)
    assert error(reduced(codec, bucket, values, group), total(values, group)) < LOSSES[name]
    assert codec.bytes_sent < BYTES[name] * bucket.flat.nbytes


def check_nothing_is_lost(name: str, group: EngineGroup) -> None:
    """Results, and what is held back, add up to the gradients, also when buckets are cut anew in between."""
    codec = CODECS[name]()
    cuts = [[["first.weight", "first.bias", "conv"], ["scalar", "last"]], [["last", "first.bias"], ["conv", "scalar"]]]
    cuts[1].append(["first.weight"])
    sums = {part: torch.zeros(shape, dtype=torch.float64) for part, shape in SHAPES.items()}
    found = {part: torch.zeros(shape, dtype=torch.float64) for part, shape in SHAPES.items()}
    for step in range(18):
        for names in cuts[step // 6 % 2]:
            bucket = bucket_of(names, group)
            values = torch.randn(bucket.flat.numel(), generator=torch.Generator().manual_seed(step * 10 + group.rank))
            exact, result = total(values + 0.1, group), reduced(codec, bucket, values + 0.1, group)
            for part in bucket.parts:
                sums[part.name] += exact[part.begin : part.end].view(part.shape)
                found[part.name] += result[part.begin : part.end].view(part.shape)
    for part, kept in codec.state_dict(group)["residual"].items():
        assert float(kept.norm()) < 0.75 * float(sums[part].norm()), part
        found[part] += kept
    torch.testing.assert_close(found, sums, rtol=1e-3, atol=1e-3)


def check_not_finite(name: str, group: EngineGroup) -> None:
    codec, bucket = CODECS[name](), bucket_of(["first.bias", "conv", "last"], group)
    values = gradient(bucket, 2, group.rank)
    reduced(codec, bucket, values, group)
    for bad, rank, place in ((torch.nan, 0, 1234), (torch.inf, group.size - 1, 3), (-torch.inf, 0, -1)):
        broken = values.clone()
        if group.rank == rank:
            broken[place] = bad
        assert not reduced(codec, bucket, broken, group)[place].isfinite()
        assert reduced(codec, bucket, values, group).isfinite().all()
    for kept in codec.state_dict(group).get("residual", {}).values():
        assert kept.isfinite().all()


def check_corners(name: str, group: EngineGroup) -> None:
    codec, bucket = CODECS[name](), bucket_of(["first.weight", "last"], group)
    values = gradient(bucket, 3, group.rank)
    assert not reduced(codec, bucket, torch.zeros_like(values), group).any()
    assert not reduced(codec, bucket, torch.zeros_like(values), group).any()
    exact = total(values, group)
    assert error(reduced(codec, bucket, values, group), exact) < LOSSES[name]
    one = bucket_of(["scalar"], group)
    result = reduced(codec, one, torch.tensor([group.rank + 0.5]), group)
    torch.testing.assert_close(result, torch.tensor([group.size**2 / 2]), rtol=0.01, atol=0)


def check_fp16_range(group: EngineGroup) -> None:
    """See [Note: fp16 does not overflow]."""
    codec, bucket = HalfCodec("fp16"), bucket_of(["last"], group)
    for magnitude in (60_000.0, 1e30, 3e-9, 1e-30, 1e-42):
        values = torch.full((1001,), magnitude)
        values[::2] = -magnitude / 3
        result = reduced(codec, bucket, values, group)
        torch.testing.assert_close(result, values * group.size, rtol=1e-3, atol=1e-44)


def check_against_reference(group: EngineGroup) -> None:
    """A few steps, beside the same for all ranks in plain torch."""
    bucket = bucket_of(["conv"], group)
    shape = (64, 144)
    for name in KEEPING:
        codec = CODECS[name]()
        residuals = [torch.zeros(bucket.flat.numel()) for _ in range(group.size)]
        codec.load_state_dict({"residual": {}, "start": {"conv": torch.eye(2, 144)}}, group)
        start = torch.eye(2, 144)
        for step in range(4):
            random = torch.Generator().manual_seed(step)
            shares = [torch.randn(bucket.flat.numel(), generator=random) for _ in range(group.size)]
            if name == "powersgd":
                views = [[tensor.view(shape) for tensor in tensors] for tensors in (shares, residuals)]
                expected, start = reference.powersgd_sum(*views, start)
                start = start / start.abs().amax(1, keepdim=True)
            elif name == "sign":
                expected = reference.sign_sum(shares, residuals)
            else:
                expected = reference.quantised_sum(shares, residuals, int(name[3:]))
            result = reduced(codec, bucket, shares[group.rank], group)
            torch.testing.assert_close(result, expected.flatten(), rtol=1e-3, atol=1e-4)
        kept = codec.state_dict(group)["residual"]["conv"].flatten()
        torch.testing.assert_close(kept, torch.stack(residuals).sum(0), rtol=1e-3, atol=1e-3)


def check_half_against_reference(group: EngineGroup) -> None:
    """To the last bit that 16 have: sums of several workers may be rounded on their way."""
    bucket = bucket_of(["conv", "last"], group)
    for name, dtype, last in (("fp16", torch.float16, 2.0**-10), ("bf16", torch.bfloat16, 2.0**-7)):
        for step, size in enumerate((1e-9, 1.0, 3e4)):
            shares = [size * gradient(bucket, step, rank) for rank in range(group.size)]
            result = reduced(CODECS[name](), bucket, shares[group.rank], group)
            expected = reference.half_sum(shares, dtype)
            largest = torch.stack(shares).abs().sum(0)
            assert bool(((result - expected).abs() <= last * largest).all()), (name, size)
            if group.size == 2:
                torch.testing.assert_close(result, expected, rtol=0, atol=0)


def check_saving_changes_nothing(name: str, group: EngineGroup) -> None:
    bucket = bucket_of(["conv", "last"], group)
    saved, unsaved = CODECS[name](), CODECS[name]()
    for step in range(4):
        values = gradient(bucket, step, group.rank)
        assert torch.equal(reduced(saved, bucket, values, group), reduced(unsaved, bucket, values, group))
        saved.state_dict(group)


def everything(place: Place) -> None:
    group = place.join()
    check_half_against_reference(group)
    for name in CODECS:
        check_one_step(name, group)
        check_not_finite(name, group)
        check_corners(name, group)
    for name in KEEPING:
        check_nothing_is_lost(name, group)
        check_saving_changes_nothing(name, group)
    check_fp16_range(group)
    check_against_reference(group)
    group.close()


@pytest.mark.parametrize("hosts", [[None] * 2, [None] * 3, ["a", "a", "b"]], ids=["two", "three", "two hosts"])
def test_codecs(hosts: list[str | None]) -> None:
    run(everything, len(hosts), hosts=hosts)


def train(place: Place, states: dict[str, Any] | None) -> dict[str, Any]:
    """Some steps, and what is kept; then, loaded, it must still be there."""
    group = place.join()
    told = {}
    for name in CODECS:
        codec, bucket = CODECS[name](), bucket_of(["first.weight", "first.bias"], group)
        if states is not None:
            state = {
                kind: {key: torch.tensor(kept) for key, kept in told.items()} for kind, told in states[name].items()
            }
            codec.load_state_dict(state, group)
            again = codec.state_dict(group)
            torch.testing.assert_close(again, state, rtol=1e-5, atol=1e-6)
            if name in KEEPING:
                # With zeros for gradients, what comes out is what was kept: in time, all of it.
                kept = torch.cat([state["residual"][part.name].flatten() for part in bucket.parts])
                found = sum(reduced(codec, bucket, torch.zeros_like(bucket.flat), group) for _ in range(60))
                assert error(found, kept) < 0.35, name
        for step in range(3):
            values = torch.randn(bucket.flat.numel(), generator=torch.Generator().manual_seed(step + place.rank))
            reduced(codec, bucket, values, group)
        state = codec.state_dict(group)
        told[name] = {kind: {key: kept.numpy().copy() for key, kept in part.items()} for kind, part in state.items()}
    group.close()
    return told


def test_what_two_workers_kept_is_loaded_by_three() -> None:
    states = run(train, 2, None)
    for name, kinds in states[0].items():
        for kind, parts in kinds.items():
            for part, kept in parts.items():
                assert np.array_equal(kept, states[1][name][kind][part])
    run(train, 3, states[0])


def test_a_state_of_another_model_is_refused() -> None:
    group: Any = SoloGroup()
    for name in KEEPING:
        codec = CODECS[name]()
        codec.load_state_dict({"residual": {"conv": torch.ones(5)}}, group)
        with pytest.raises(
            ValueError, match=r"held back of conv has the shape \(5,\), and its gradient \(64, 16, 3, 3\)"
        ):
            codec.reduce(bucket_of(["conv"]), group)


def test_wrong_arguments() -> None:
    group: Any = SoloGroup()
    wrong: Any = Bucket(torch.ones(9, dtype=torch.float64), (Part("a", (9,), 0, 9),))
    for name in ("int8", "int4", "sign"):
        with pytest.raises(ValueError, match=r"begins with a is torch.float64 on cpu; codecs take contiguous float32"):
            CODECS[name]().reduce(wrong, group)
    for make, message in (
        (lambda: HalfCodec("fp8"), "kind='fp8': choose one of fp16, bf16"),  # type: ignore[arg-type]
        (lambda: QuantisedCodec(3), "bits=3: gradients are quantised with 8 or 4 bits"),  # type: ignore[arg-type]
        (lambda: PowerSgdCodec(0), "rank=0: a rank is a whole number from 1 on"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
