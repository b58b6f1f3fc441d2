"""Code of a model that uses parameters itself, and that changes tensors in place, under tensor parallelism."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from divided import check, joined
from ranks import Place, run
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from argosy.parallel.tensor.apply import tensor_parallel
from argosy.parallel.tensor.config import TensorConfig

DEADLINE_SECONDS = 60


class Direct(nn.Module):
    """Code that uses parameters which every rank has whole, without the modules that they belong to."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.norm, self.counter = nn.Embedding(8, 16), nn.LayerNorm(16), nn.LayerNorm(2)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.scale = nn.Parameter(torch.full((16,), 0.5))
        self.seen: list[type] = []

    def forward(self, x: Tensor) -> Tensor:
        before = x + self.places.weight[: x.shape[1]]
        self.seen.append(type(before))
        count = self.counter.weight
        with torch.no_grad():
            count += 1.0
            count.add_(torch.ones(2))
            count[torch.tensor([0, 1])] = count[0].clone()  # which DTensor cannot do
            assert copy.deepcopy(count).tolist() == count.tolist() == [3.0, 3.0]
        nn.init.constant_(self.counter.bias, 0.25)  # torch gives such functions their tensor by name
        assert self.counter.bias.sum().item() == 0.5
        (slope,) = torch.autograd.grad((self.norm.weight * 3.0).sum(), self.norm.weight)
        assert slope.sum().item() == 48.0
        before[:, 1:].mul_(2.0)
        before = torch.zeros_like(before).add_(before).add_(self.norm.bias) * self.scale
        inside = F.linear(F.layer_norm(before, (16,), self.norm.weight, self.norm.bias), self.up.weight)  # divided
        return before + self.down(inside + self.up.bias) + self.counter(count + self.counter.bias).sum()


def first_part(lost: Lost, x: Tensor) -> None:
    lost.up(x)[..., :8].sigmoid_()


def part_of_a_part(lost: Lost, x: Tensor) -> None:
    lost.up(x)[..., :8].transpose(0, 1)[1:].add_(1.0)


def set_first_part(lost: Lost, x: Tensor) -> None:
    lost.up(x)[..., :8] = 0.0


def part_of_a_fused(lost: Lost, x: Tensor) -> None:
    lost.qkv(x)[..., :32].sigmoid_()


def activation(lost: Lost, x: Tensor) -> None:
    F.relu(lost.qkv(x), inplace=True)


LOST = (first_part, part_of_a_part, set_first_part, part_of_a_fused, activation)


class Lost(nn.Module):
    """Code that changes what it would have a copy of: nobody is to find out by wrong numbers."""

    def __init__(self, code: Callable[[Lost, Tensor], None]) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        self.code(self, x)
        return x


def _direct(place: Place) -> None:
    mesh = joined(place)
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    direct: list[Direct] = []
    check(lambda: direct.append(Direct()) or direct[-1], mesh, x)
    alone, divided = direct
    assert divided.seen == alone.seen == [Tensor], "what every rank has whole is plain, which is faster"
    assert isinstance(divided.counter.weight, DTensor)
    dist.destroy_process_group()


def test_a_model_may_use_parameters_that_every_rank_has_whole() -> None:
    run(_direct, 2, deadline_seconds=DEADLINE_SECONDS)


def _lost(place: Place) -> None:
    mesh = joined(place)
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    for code in LOST:
        lost = Lost(code)
        divided = tensor_parallel(lost, mesh, TensorConfig(tensor_plan="qkv:column3,out:row,up:column,down:row"))
        with pytest.raises(RuntimeError, match="in place"):
            lost(x)
        divided.close()
    dist.destroy_process_group()


def test_changes_in_place_that_would_be_lost_are_refused() -> None:
    run(_lost, 2, deadline_seconds=DEADLINE_SECONDS)
