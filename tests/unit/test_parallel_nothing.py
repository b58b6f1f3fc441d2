"""A worker without a sample: its model runs, its loss is 0, its gradients are finite; and it is left out of means."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from argosy.comm.group import Op, SoloGroup
from argosy.comm.mean import weighted_mean
from argosy.parallel.nothing import tolerate_empty_batches

CLASSES = 5


class Net(nn.Module):
    """What cannot take an empty batch: batch normalisation, and a view that must guess a size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Sequential(nn.Linear(4 * 6 * 6, CLASSES), nn.BatchNorm1d(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(x.view(x.size(0), -1))


def batch(samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images, their classes, and one target number for each output."""
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 1, 8, 8, generator=generator)
    return x, torch.arange(samples) % CLASSES, torch.rand(samples, CLASSES, generator=generator)


def tolerant(model: nn.Module, is_empty: Callable[[], bool] = lambda: True) -> nn.Module:
    tolerate_empty_batches(model, is_empty)
    return model


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda out, y, _: F.cross_entropy(out, y),
    "CrossEntropyLoss": lambda out, y, _: nn.CrossEntropyLoss(label_smoothing=0.1)(out, y),
    "weighted classes": lambda out, y, _: nn.CrossEntropyLoss(weight=torch.ones(CLASSES))(out, y),
    "nll_loss": lambda out, y, _: F.nll_loss(out.log_softmax(1), y),
    "mse_loss": lambda out, _, target: F.mse_loss(out, target),
    "BCEWithLogitsLoss": lambda out, _, target: nn.BCEWithLogitsLoss()(out, target),
    "written out": lambda out, _, target: ((out - target) ** 2).mean(),
    "mean of each": lambda out, y, _: F.cross_entropy(out, y, reduction="none").mean(),
    "sum over length": lambda out, y, _: F.cross_entropy(out, y, reduction="sum") / len(y),
    "sum over weights": lambda out, y, target: (out.sum(1) * target.sum(1)).sum() / target.sum(),
    "root": lambda out, _, target: F.mse_loss(out, target).sqrt(),
    "two terms": lambda out, y, target: F.cross_entropy(out, y) + 0.1 * F.mse_loss(out, target),
}


@pytest.mark.parametrize("loss_fn", LOSSES.values(), ids=LOSSES.keys())
def test_the_loss_of_nothing_is_zero_and_its_gradients_are_finite(
    loss_fn: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> None:
    model, (x, y, target) = tolerant(Net()), batch(0)
    loss = loss_fn(model(x), y, target)
    loss.backward()
    assert loss.item() == 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_the_output_of_nothing_has_the_shape_the_script_expects() -> None:
    model, (x, y, _) = tolerant(Net()), batch(0)
    output = model(x)
    assert output.shape == (0, CLASSES)
    assert (output.argmax(1) == y).sum().item() == 0
    assert (output.argmax(1) == y).float().mean().item() == 0.0
    assert [*output.softmax(1)] == []


def test_a_running_sum_of_losses_stays_a_number() -> None:
    model, total = tolerant(Net(), is_empty=lambda: samples == 0), 0.0
    for samples in (4, 0):
        x, y, _ = batch(samples)
        total += F.cross_entropy(model(x), y).item()
    assert total > 0
    assert math.isfinite(total)


def test_batches_with_samples_are_untouched() -> None:
    plain, ours = Net(), Net()
    ours.load_state_dict(plain.state_dict())
    tolerant(ours, is_empty=lambda: samples == 0)
    for samples in (3, 0, 2):
        x, y, _ = batch(samples)
        if samples == 0:
            ours(x)
            ours.load_state_dict(plain.state_dict())  # running statistics of nothing have weight 0 in the job's
            continue
        outputs = [model(x) for model in (plain, ours)]
        assert type(outputs[1]) is Tensor
        assert torch.equal(*outputs)
        for output in outputs:
            F.cross_entropy(output, y).backward()
        for mine, theirs in zip(plain.parameters(), ours.parameters(), strict=True):
            assert torch.equal(mine.grad, theirs.grad)


def test_an_empty_batch_of_the_scripts_own_making_is_left_to_it() -> None:
    seen: list[torch.Size] = []
    model = tolerant(nn.Linear(3, 2), is_empty=lambda: False)
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    assert model(torch.ones(0, 3)).shape == (0, 2)
    assert seen == [(0, 3)]


class Nested(nn.Module):
    def forward(self, tokens: Tensor, *, extra: dict[str, Any]) -> dict[str, Any]:
        mixed = extra["scale"] * extra["features"].mean(0) + tokens.sum(0).float()
        return {"logits": (extra["features"], [tokens]), "mixed": mixed.sum(), "name": "nested"}


def test_nested_inputs_and_outputs_are_looked_into() -> None:
    tokens, features = torch.ones(0, 4, dtype=torch.long), torch.ones(0, 4)
    output = tolerant(Nested())(tokens, extra={"features": features, "scale": 2.0})
    (first, (second,)), mixed = output["logits"], output["mixed"]
    assert (first.shape, second.shape, second.dtype) == ((0, 4), (0, 4), torch.long)
    assert mixed.isfinite()
    assert output["name"] == "nested"


def test_a_model_that_fails_on_nothing_works_again_afterwards() -> None:
    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if fails:
                raise RuntimeError("out of memory")
            return super().forward(x)

    model, empty = Failing(3, 2), True
    tolerant(model, is_empty=lambda: empty)
    fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        model(torch.ones(0, 3))
    fails = empty = False
    assert model(torch.ones(4, 3)).shape == (4, 2)


# The mean over workers.


class Rehearsal(SoloGroup):
    """Adds up what the members give, one after the other; then gives each of them the sum."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.adding = True

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        assert op == "sum"
        if self.adding:
            self.total = tensor.clone() if self.total is None else self.total + tensor
        tensor.copy_(self.total)


def mean_of(members: list[tuple[Tensor | float, float]]) -> list[Tensor]:
    """The mean as each member sees it."""
    group = Rehearsal()
    for value, weight in members:
        try:
            weighted_mean(value, weight, group.all_reduce)
        except ValueError:
            assert weight == 0  # nobody of any weight has come yet
    group.adding = False
    return [weighted_mean(value, weight, group.all_reduce) for value, weight in members]


@settings(derandomize=True, deadline=None)
@given(value=st.floats(-1e100, 1e100), weight=st.floats(1e-3, 1e9))
def test_alone_the_mean_is_the_value(value: float, weight: float) -> None:
    mean = weighted_mean(value, weight, SoloGroup().all_reduce)
    assert (mean.dtype, mean.shape) == (torch.float64, ())
    assert float(mean) == pytest.approx(value, rel=1e-15, abs=1e-300)


@pytest.mark.parametrize(
    "value",
    [torch.tensor(3), torch.ones(2, 3, dtype=torch.bfloat16), torch.arange(6.0).view(2, 3).t(), torch.empty(0, 2)],
    ids=["whole number", "bfloat16", "transposed", "empty"],
)
def test_the_mean_has_the_shape_of_the_value_and_leaves_it_alone(value: Tensor) -> None:
    before = value.clone()
    mean = weighted_mean(value, 2.0, SoloGroup().all_reduce)
    assert mean.shape == value.shape
    assert torch.equal(mean, before.double())
    assert torch.equal(value, before)


def test_the_mean_of_a_loss_does_not_hold_on_to_its_graph() -> None:
    assert not weighted_mean(torch.ones(2, requires_grad=True) * 3, 1.0, SoloGroup().all_reduce).requires_grad


def test_members_count_by_their_weight() -> None:
    for mean in mean_of([(1.0, 3), (2.0, 1), (5.0, 0)]):
        assert float(mean) == pytest.approx((3 * 1.0 + 1 * 2.0) / 4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_member_of_no_weight_is_left_out_whatever_its_value(value: float) -> None:
    for mean in mean_of([(value, 0), (2.0, 4)]):
        assert float(mean) == 2.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_member_of_some_weight_is_not(value: float) -> None:
    for mean in mean_of([(value, 1), (2.0, 4)]):
        assert repr(float(mean)) == repr(value)


def test_there_is_no_mean_of_nothing() -> None:
    with pytest.raises(ValueError, match="weights of all workers are zero"):
        weighted_mean(1.0, 0, SoloGroup().all_reduce)


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf])
def test_a_weight_is_zero_or_more(weight: float) -> None:
    with pytest.raises(ValueError, match=f"weight={weight}"):
        weighted_mean(1.0, weight, SoloGroup().all_reduce)
