"""A model on several ranks beside the same model in one process, to compare gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from ranks import Place
from torch import Tensor, nn

from argosy.comm.engine import EngineGroup
from argosy.comm.pending import Pending
from argosy.compress.codec import Bucket, Codec
from argosy.data.cursor import Cursor, Position
from argosy.parallel.config import ReducerConfig
from argosy.parallel.data import DataParallel
from argosy.parallel.passes import SharedPasses

SHARES = {2: [3, 5], 3: [4, 0, 3]}  # samples of each worker; one has none
TINY = ReducerConfig(bucket_mbytes=0.0005)


def at(
    samples: int, total: int, merged: int | None = None, closes: bool = True, step: int = 0, is_even: bool = False
) -> Position:
    return Position(0, step, 9, samples, total, merged or total, closes, merged is None or step == 0, is_even)


class Together:
    """A model on one rank, and the same model on all samples at once, for comparison."""

    def __init__(
        self, place: Place, model: nn.Module, config: ReducerConfig = TINY, codec: Codec | None = None
    ) -> None:
        self.group: EngineGroup = place.join()
        self.cursor = Cursor()
        self.shares = SHARES[place.size]
        self.model, self.alone = model, copy.deepcopy(model)
        self.passes = SharedPasses(self.group)
        self.parallel = DataParallel(model, self.group, self.cursor, 0, config, codec, passes=self.passes)

    def mine(self, whole: Tensor) -> Tensor:
        begin = sum(self.shares[: self.group.rank])
        return whole[begin : begin + self.shares[self.group.rank]]

    def begin(self, **more: Any) -> None:
        even = len(set(self.shares)) == 1
        self.cursor.move(self, at(self.shares[self.group.rank], sum(self.shares), is_even=even, **more))

    def backward(self, loss: Callable[[nn.Module, Tensor], Tensor], whole: Tensor, **more: Any) -> None:
        self.begin(**more)
        loss(self.model, self.mine(whole)).backward()
        loss(self.alone, whole).backward()

    def check(self, tolerance: float = 1e-6) -> None:
        for (name, mine), theirs in zip(self.model.named_parameters(), self.alone.parameters(), strict=True):
            if theirs.grad is None:
                assert mine.grad is None, name
            else:
                assert mine.grad is not None, name
                torch.testing.assert_close(mine.grad.to_dense(), theirs.grad.to_dense(), atol=tolerance, rtol=1e-5)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none)
        self.alone.zero_grad(set_to_none)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 2))


def batch(step: int = 0) -> Tensor:
    return torch.randn(20, 6, generator=torch.Generator().manual_seed(step))


def large_net() -> nn.Module:
    """With a matrix that is reduced where autograd has made it."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 600), nn.Tanh(), nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 2))


class Telling(Codec):
    """Sums exactly, and remembers what it was given."""

    def __init__(self, weighs: bool = False) -> None:
        super().__init__()
        self.weighs = weighs
        self.names: list[str] = []
        self.weights: set[float] = set()

    def steps(self, bucket: Bucket, group: EngineGroup) -> Iterator[Pending]:
        self.names += [part.name for part in bucket.parts]
        assert sum(part.end - part.begin for part in bucket.parts) == bucket.flat.numel()
        self.weights.add(bucket.weight)
        yield group.all_reduce(bucket.flat.mul_(bucket.weight), wait=False)
