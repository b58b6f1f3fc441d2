"""Short steps: SGD moves parameters where a sum is not zero, and everybody else sees the whole gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from argosy.compress.short_step import ShortSteps


def summed(shape: tuple[int, ...]) -> tuple[nn.Parameter, Tensor]:
    """A parameter with a gradient that is zero except at some places."""
    numbers = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(shape, generator=numbers))
    places = torch.randperm(parameter.numel(), generator=numbers)[:7]
    parameter.grad = torch.zeros(shape)
    parameter.grad.view(-1)[places[:-1]] = torch.randn(6, generator=numbers)  # at one place the sum is zero
    return parameter, places


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("shape", [(40,), (6, 8), (4, 3, 2, 5)])
def test_a_short_step_is_the_whole_one(shape: tuple[int, ...], foreach: bool | None) -> None:
    parameter, places = summed(shape)
    assert parameter.grad is not None
    whole = parameter.grad
    expected = parameter.detach() - 0.1 * whole
    steps = ShortSteps()
    steps.note("weight", whole.view(-1), places)
    steps.begin({"weight": parameter, "another": nn.Parameter(torch.ones(2))})
    assert parameter.grad.is_sparse
    torch.optim.SGD([parameter], lr=0.1, foreach=foreach).step()
    steps.end()
    torch.testing.assert_close(parameter.detach(), expected, rtol=3e-7, atol=1e-7)  # a rounding more or less
    assert parameter.grad is whole


def test_a_gradient_that_was_changed_or_replaced_is_stepped_with_as_it_is() -> None:
    for change in ("clip", "replace", "clear", "forget"):
        parameter, places = summed((6, 8))
        assert parameter.grad is not None
        steps = ShortSteps()
        steps.note("weight", parameter.grad.view(-1), places)
        if change == "clip":
            nn.utils.clip_grad_norm_([parameter], 0.01)
        elif change == "replace":
            parameter.grad = parameter.grad.clone()
        elif change == "clear":
            parameter.grad = None
        else:
            steps.forget("weight")
        before = parameter.grad
        steps.begin({"weight": parameter})
        assert parameter.grad is before, change
        steps.end()
        assert parameter.grad is before, change


def test_what_a_closure_has_put_there_stays_and_no_sum_is_used_twice() -> None:
    parameter, places = summed((6, 8))
    assert parameter.grad is not None
    steps = ShortSteps()
    steps.note("weight", parameter.grad.view(-1), places)
    steps.begin({"weight": parameter})
    parameter.grad = mine = torch.ones(6, 8)
    steps.end()
    steps.begin({"weight": parameter})
    assert parameter.grad is mine
