"""Backward passes that are not one whole pass of one model: several models in one, and one that fails."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from ranks import Place, run
from together import TINY, Telling, Together, batch, large_net, squares
from torch import Tensor, nn

from argosy.compress.codec import Codec
from argosy.parallel.data import DataParallel


class Halves(nn.Module):
    """Two layers, the first of which only some workers use."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.sometimes, self.always = nn.Linear(30, 30, bias=False), nn.Linear(30, 30, bias=False)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        return self.always(self.sometimes(x) if use else x)


def check_two_models(place: Place, codec: Codec | None) -> None:
    both = Together(place, Halves(1), codec=codec)
    other = Halves(2)
    alone = copy.deepcopy(other)
    second = DataParallel(other, both.group, both.cursor, 1, TINY, Telling() if codec else None, passes=both.passes)
    both.shares = [4, 4]
    whole = torch.randn(8, 30, generator=torch.Generator().manual_seed(0))
    for step in range(3):
        both.begin(step=step)
        use = place.rank == 1
        both.model(other(both.mine(whole), use), True).square().mean().backward()
        for rank, part in enumerate(whole.chunk(2)):
            (both.alone(alone(part, rank == 1), True).square().mean() / 2).backward()
        both.check()
        torch.testing.assert_close(other.always.weight.grad, alone.always.weight.grad, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(other.sometimes.weight.grad, alone.sometimes.weight.grad, atol=1e-6, rtol=1e-5)
        both.zero_grad()
        other.zero_grad()
        alone.zero_grad()
    second.close()
    both.parallel.close()


@pytest.mark.parametrize("codec", [None, Telling()])
def test_two_models_in_one_pass_that_workers_see_in_another_order(codec: Codec | None) -> None:
    run(check_two_models, 2, codec)


def check_failed_pass(place: Place, set_to_none: bool) -> None:
    """The first worker clears its gradients before the second has begun, and so before sums arrive in them."""
    both = Together(place, large_net())
    both.begin()
    handle = both.model[0].weight.register_hook(_fail)
    time.sleep(0.3 * place.rank)
    with pytest.raises(ArithmeticError):
        squares(both.model, both.mine(batch(1)[: sum(both.shares)])).backward()
    handle.remove()
    time.sleep(0.3 * place.rank)
    both.model.zero_grad(set_to_none)
    both.group.barrier()
    for step in range(1, 3):
        both.backward(squares, batch()[: sum(both.shares)], step=step)
        both.check()
        both.zero_grad()


def _fail(_: Tensor) -> None:
    raise ArithmeticError("as a script's own hook may")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_pass_that_fails_leaves_nothing_behind(set_to_none: bool) -> None:
    run(check_failed_pass, 2, set_to_none)
