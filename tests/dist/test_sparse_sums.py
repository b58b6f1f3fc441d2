"""DGC and top-k between real ranks: against SGD in one process, against plain torch, and that nothing is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from ranks import Function, Place
from ranks import run as run_ranks
from sparse_reference import Rule, take, update
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from argosy.compress.codec import Bucket, Codec, Part
from argosy.compress.dgc import DgcCodec
from argosy.compress.sparse import SparseCodec
from argosy.compress.topk import TopKCodec

SHAPES = {"w": (160, 128), "bias": (128,), "conv": (64, 32, 3, 3), "one": (1,)}
SIZES = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
STEPS = 12


def run(function: Function, size: int, *arguments: Any, **options: Any) -> list[Any]:
    """What all ranks returned. Tensors travel as arrays: torch would send them as handles of memory that is gone."""
    told = run_ranks(_as_arrays, size, function, *arguments, **options)
    return [pytree.tree_map_only(np.ndarray, torch.from_numpy, one) for one in told]


def _as_arrays(place: Place, function: Function, *arguments: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.numpy().copy(), function(place, *arguments))


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def weight(rank: int, size: int) -> float:
    """A rank's part of the samples: ranks have 1, 2, ... of them."""
    return (rank + 1) / (size * (size + 1) / 2)


def gradient(rank: int, step: int) -> dict[str, Tensor]:
    return values(1000 * step + rank)


def share(rank: int, step: int, size: int) -> dict[str, Tensor]:
    """A rank's gradient, weighted by its samples."""
    return {name: numbers * weight(rank, size) for name, numbers in gradient(rank, step).items()}


def bucket_of(tensors: dict[str, Tensor], weight: float = 1.0) -> Bucket:
    parts, begin = [], 0
    for name, tensor in tensors.items():
        parts.append(Part(name, tuple(tensor.shape), begin, begin + tensor.numel()))
        begin += tensor.numel()
    return Bucket(torch.cat([tensor.reshape(-1) for tensor in tensors.values()]), tuple(parts), weight)


def cut(bucket: Bucket) -> dict[str, Tensor]:
    return {part.name: bucket.flat[part.begin : part.end].view(part.shape) for part in bucket.parts}


def kept(codec: SparseCodec, name: str) -> Tensor:
    rest = codec._kept[name].rest
    assert rest is not None
    return rest


def train(place: Place, variants: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    group = place.join()
    results = []
    for options in variants:
        parameters = {name: nn.Parameter(value) for name, value in values(7).items()}
        optimizer = torch.optim.SGD(parameters.values(), lr=0.05, **options)
        codec = DgcCodec(0.0, 0)
        codec.attach(parameters, optimizer)
        for step in range(STEPS):
            codec.begin_step(step / 4)
            mine = gradient(place.rank, step)
            for names in (("w", "bias"), ("conv", "one")):
                bucket = bucket_of({name: mine[name] for name in names}, weight(place.rank, place.size))
                codec.reduce(bucket, group)
                for name, total in cut(bucket).items():
                    parameters[name].grad = total
            optimizer.step()
        results.append({name: p.detach() for name, p in parameters.items()})
    group.close()
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_at_sparsity_zero_dgc_is_sgd(size: int) -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "weight_decay": 0.01},
        {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
        {"weight_decay": 0.01},
    ]
    told = run(train, size, variants)
    for number, options in enumerate(variants):
        parameters = {name: nn.Parameter(value) for name, value in values(7).items()}
        optimizer = torch.optim.SGD(parameters.values(), lr=0.05, **options)
        for step in range(STEPS):
            for name, p in parameters.items():
                p.grad = sum((share(rank, step, size)[name] for rank in range(size)), torch.zeros(()))
            optimizer.step()
        for name, p in parameters.items():
            torch.testing.assert_close(told[0][number][name], p.detach(), rtol=1e-5, atol=1e-6)
            for other in told[1:]:
                assert torch.equal(other[number][name], told[0][number][name])


def compress_steps(place: Place, sparsity: float, options: dict[str, Any], clip: float | None) -> Any:
    group = place.join()
    parameters = {name: nn.Parameter(value) for name, value in values(7).items()}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, **options)
    codec = DgcCodec(sparsity, 0, clip, exchange="sparse")
    codec.attach(parameters, optimizer)
    totals = []
    for step in range(STEPS):
        codec.begin_step(step)
        bucket = bucket_of(gradient(place.rank, step), weight(place.rank, place.size))
        codec.reduce(bucket, group)
        totals.append(bucket.flat.clone())
        for name, total in cut(bucket).items():
            parameters[name].grad = total
        optimizer.step()
    state = codec.state_dict(group)
    group.close()
    return totals, state


class Reference:
    """DGC of all ranks in one process, in plain torch."""

    def __init__(self, size: int, sparsity: float, options: dict[str, Any], clip: float | None) -> None:
        self.size, self.sparsity, self.clip, self.options = size, sparsity, clip, options
        self.u = [{name: torch.zeros(SIZES[name]) for name in SHAPES} for _ in range(size)]
        self.v = [{name: torch.zeros(SIZES[name]) for name in SHAPES} for _ in range(size)]
        self.whole = {name: torch.zeros(SIZES[name]) for name in SHAPES}

    def total(self, name: str, shares: list[Tensor], parameter: Tensor) -> Tensor:
        momentum, nesterov = self.options["momentum"], self.options["nesterov"]
        decay = self.options["weight_decay"]
        limit = self.clip * self.size**-0.5 if self.clip else float("inf")
        scales = [min(1.0, limit / float(part.norm())) for part in shares]
        if SIZES[name] < 16384:
            rule = Rule(1.0, decay, momentum, nesterov)
            total = torch.zeros(SIZES[name])
            shared = sum((part * scale for part, scale in zip(shares, scales, strict=True)), torch.zeros(()))
            update(shared, self.whole[name], total, parameter, rule)
            return total
        total = torch.zeros(SIZES[name])
        for rank in range(self.size):
            rule = Rule(scales[rank], decay / self.size, momentum, nesterov)
            update(shares[rank], self.u[rank][name], self.v[rank][name], parameter, rule)
            sent = take(self.u[rank][name], self.v[rank][name], round((1 - self.sparsity) * SIZES[name]))
            total[list(sent)] += torch.tensor(list(sent.values()))
        return total


@pytest.mark.parametrize(("size", "nesterov", "clip"), [(2, False, None), (3, True, 40.0)])
def test_dgc_is_what_plain_torch_computes_and_the_same_bits_everywhere(
    size: int, nesterov: bool, clip: float | None
) -> None:
    options = {"momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
    told = run(compress_steps, size, 0.99, options, clip)
    reference = Reference(size, 0.99, options, clip)
    parameters = {name: value.reshape(-1) for name, value in values(7).items()}
    for step in range(STEPS):
        for totals, _ in told[1:]:
            assert torch.equal(totals[step].view(torch.int32), told[0][0][step].view(torch.int32))
        shares = [share(rank, step, size) for rank in range(size)]
        expected = {
            name: reference.total(name, [part[name].reshape(-1) for part in shares], parameters[name])
            for name in SHAPES
        }
        torch.testing.assert_close(told[0][0][step], torch.cat(list(expected.values())), rtol=1e-4, atol=1e-5)
        for name, total in expected.items():
            parameters[name] -= 0.1 * total
    state = told[0][1]
    for name in ("w", "conv"):
        for kind, held in (("velocity", reference.u), ("rest", reference.v)):
            everybodys = torch.stack([one[name] for one in held]).sum(0)
            torch.testing.assert_close(state[kind][name], everybodys, rtol=1e-4, atol=1e-4)


def whole_numbers(place: Place, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """What was brought, what came out, and what is kept, of numbers that add up without rounding."""
    group = place.join()
    codec: SparseCodec = TopKCodec(0.02, "sparse")
    if kind == "dgc":
        codec = DgcCodec(0.98, 0, exchange="sparse")
        parameter = nn.Parameter(torch.zeros(200, 100))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        codec.attach({"w": parameter}, optimizer)
    generator = torch.Generator().manual_seed(place.rank)
    brought, came = torch.zeros(20_000), torch.zeros(20_000)
    for step in range(30):
        mine = torch.randint(-50, 51, (20_000,), generator=generator).float()
        brought += mine
        bucket = bucket_of({"w": mine.view(200, 100)})
        if step == 20:
            codec.exchange = "dense"  # in between, all is sent
        codec.reduce(bucket, group)
        codec.exchange = "sparse"
        if kind == "dgc":
            optimizer.step()
        came += bucket.flat
    group.close()
    return brought, came, kept(codec, "w")


@pytest.mark.parametrize("kind", ["topk", "dgc"])
def test_nothing_is_lost(kind: str) -> None:
    told = run(whole_numbers, 3, kind)
    assert all(torch.equal(came, told[0][1]) for _, came, _ in told)
    assert torch.equal(sum(brought for brought, _, _ in told), told[0][1] + sum(rest for _, _, rest in told))


def fewer(place: Place) -> Any:
    """Three workers save, two of them go on."""
    group = place.join()
    parameters = {name: nn.Parameter(value) for name, value in values(7).items()}
    codec = DgcCodec(0.99, 0, exchange="sparse")
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9)
    codec.attach(parameters, optimizer)
    for step in range(3):
        codec.reduce(bucket_of(share(place.rank, step, 3)), group)
        optimizer.step()
    state = codec.state_dict(group)
    group.close()
    if place.rank == 2:
        return state, state
    group = place.join("fewer", ranks=[0, 1])
    after = DgcCodec(0.99, 0, exchange="sparse")
    after.attach(parameters, torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9))
    after.load_state_dict(state, group)
    again = after.state_dict(group)
    after.reduce(bucket_of(share(place.rank, 4, 2)), group)
    group.close()
    return state, again


def test_what_was_kept_survives_a_change_of_the_worker_count() -> None:
    told = run(fewer, 3)
    for state, again in told:
        assert set(state["rest"]) == set(state["velocity"]) == {"w", "conv"}
        assert set(state["whole"]) == {"bias", "one"}
        for kind in state:
            for name, total in state[kind].items():
                assert torch.equal(total, told[0][0][kind][name])
                torch.testing.assert_close(again[kind][name], total)
                assert total.abs().sum() > 0


def corners(place: Place, kind: str, exchange: Any) -> None:
    group = place.join()
    parameters = {name: nn.Parameter(value) for name, value in values(7).items()}
    codec: Codec = TopKCodec(0.01, exchange)
    if kind == "dgc":
        codec = DgcCodec(0.99, 0, clip=100.0, exchange=exchange)
        optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9, weight_decay=0.0, nesterov=True)
        codec.attach(parameters, optimizer)

    def total(**changes: Tensor) -> dict[str, Tensor]:
        zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        bucket = bucket_of({**zeros, **changes})
        codec.reduce(bucket, group)
        if kind == "dgc":
            optimizer.step()
        return cut(bucket)

    assert all(not value.any() for value in total().values())
    one = total(one=torch.ones(1))["one"].item()
    assert one == pytest.approx(place.size * (1.9 if kind == "dgc" else 1))
    for broken in (float("nan"), float("inf"), float("-inf")):
        for name in SHAPES:
            spoilt = torch.ones(SHAPES[name])
            if place.rank == 1:
                spoilt.view(-1)[SIZES[name] // 2 :] = broken  # far more than are sent
            after = total(**{name: spoilt})
            assert not after[name].isfinite().all(), (name, broken)
            assert all(value.isfinite().all() for other, value in after.items() if other != name)
            assert all(value.isfinite().all() for value in total().values()), (name, broken)
    group.close()


@pytest.mark.parametrize("exchange", ["sparse", "dense"])
@pytest.mark.parametrize("kind", ["topk", "dgc"])
def test_zeros_single_elements_and_broken_numbers(kind: str, exchange: str) -> None:
    run(corners, 2, kind, exchange)


def two_hosts(place: Place) -> tuple[Tensor, int]:
    group = place.join()
    codec = TopKCodec(0.01)
    bucket = bucket_of(share(place.rank, 0, place.size))
    codec.reduce(bucket, group)
    group.close()
    return bucket.flat, codec.bytes_sent


def test_between_hosts_all_decide_alike() -> None:
    told = run(two_hosts, 3, hosts=["a", "a", "b"])
    assert all(torch.equal(flat, told[0][0]) and sent == told[0][1] for flat, sent in told)
