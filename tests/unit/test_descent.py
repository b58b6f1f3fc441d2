"""A step on a gradient of which it is known where it is not zero is SGD's own, whatever the script did meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from argosy import _native
from argosy.compress.descent import Landed
from argosy.compress.takeover import TakenOver

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def landed(count: int, k: int, workers: int, seed: int = 0) -> tuple[nn.Parameter, Landed]:
    """A parameter whose gradient is the sum of what workers have sent, some of it for the same places."""
    generator = torch.Generator().manual_seed(seed)
    entries = _native.sparse_entries(count, k)
    gaps = torch.zeros((workers, entries), dtype=torch.int16)
    parameter = nn.Parameter(torch.randn(count, generator=generator))
    parameter.grad = torch.zeros(count)
    common = torch.randn(count, generator=generator)
    for worker in range(workers):
        share = common + torch.randn(count, generator=generator)
        kept, values = torch.zeros(count), torch.zeros(entries)
        _native.sparse_compress(
            share.data_ptr(),
            0,
            kept.data_ptr(),
            0,
            count,
            1.0,
            0.0,
            0.0,
            False,
            k,
            values.data_ptr(),
            gaps[worker].data_ptr(),
        )
        _native.sparse_add(parameter.grad.data_ptr(), count, values.data_ptr(), gaps[worker].data_ptr(), entries)
    return parameter, Landed.of(parameter.grad, gaps)


def descended(parameter: nn.Parameter, rate: float) -> Tensor:
    """What torch makes of it."""
    copy = nn.Parameter(parameter.detach().clone())
    assert parameter.grad is not None
    copy.grad = parameter.grad.clone()
    torch.optim.SGD([copy], lr=rate).step()
    return copy.detach()


@given(
    count=st.integers(1, 200_000),
    share=st.floats(0, 1),
    workers=st.integers(1, 5),
    rate=st.floats(1e-6, 10),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_a_step_is_torchs_bit_for_bit(count: int, share: float, workers: int, rate: float, seed: int) -> None:
    parameter, places = landed(count, max(1, round(share**4 * count)), workers, seed)
    expected = descended(parameter, rate)
    assert places.descend(parameter, rate)
    assert torch.equal(parameter.detach(), expected)
    assert parameter._version == 1  # a graph that is kept knows that it is stale


def scale_data(gradient: Tensor) -> None:
    gradient.data.mul_(0.25)


def mask_data(gradient: Tensor) -> None:
    gradient.data[: len(gradient) // 2] = 0


@pytest.mark.parametrize("change", [scale_data, mask_data])
def test_changes_of_what_was_sent_count(change: Callable[[Tensor], None]) -> None:
    parameter, places = landed(50_000, 50, 2)
    assert parameter.grad is not None
    change(parameter.grad)
    expected = descended(parameter, 0.1)
    assert places.descend(parameter, 0.1)
    assert torch.equal(parameter.detach(), expected)


def replace(gradient: Tensor) -> None:
    gradient.set_(torch.randn_like(gradient))  # type: ignore[call-overload]


@pytest.mark.parametrize(
    "change",
    [
        lambda gradient: gradient.clamp_(-0.1, 0.1),
        lambda gradient: gradient.data.add_(1e-3),
        lambda gradient: gradient.data[1000:2000].add_(1e-3),
        lambda gradient: gradient.numpy().__iadd__(1),
        replace,
    ],
    ids=["torch", "data", "some rows of data", "numpy", "another memory"],
)
def test_a_gradient_that_was_changed_counts_as_a_whole(change: Callable[[Tensor], object]) -> None:
    parameter, places = landed(50_000, 50, 2)
    assert parameter.grad is not None
    change(parameter.grad)
    expected = descended(parameter, 0.1)
    assert not places.descend(parameter, 0.1)
    assert torch.equal(parameter.detach(), expected)


def test_a_step_that_raises_can_be_made_again() -> None:
    parameter, places = landed(50_000, 50, 2)
    small = nn.Parameter(torch.ones(3))
    small.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter, small], lr=0.1, momentum=0.9)
    taken = TakenOver({"large": parameter, "small": small}, optimizer)
    taken.land("large", places)
    expected, gradient = descended(parameter, 0.5), parameter.grad
    optimizer.param_groups[0]["lr"] = "none"
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5  # as when a state is loaded between backward and step
    optimizer.step()
    assert torch.equal(parameter.detach(), expected)
    assert torch.equal(small.detach(), torch.full((3,), 0.5))
    assert parameter.grad is gradient
    assert optimizer.param_groups[0]["momentum"] == 0.9


def test_a_hook_that_has_just_come_sees_all_gradients() -> None:
    parameter, places = landed(50_000, 50, 2)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    taken = TakenOver({"large": parameter}, optimizer)
    taken.land("large", places)
    expected, seen = descended(parameter, 0.1), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(parameter.grad is not None))
    optimizer.step()
    assert seen == [True]
    assert torch.equal(parameter.detach(), expected)


def test_what_is_not_a_number_reaches_the_parameter() -> None:
    parameter, places = landed(50_000, 50, 2)
    assert parameter.grad is not None
    parameter.grad.data[parameter.grad.abs().argmax()] = float("nan")
    assert places.descend(parameter, 0.1)
    assert parameter.isnan().sum() == 1
