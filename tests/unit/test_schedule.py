"""Scaled and warmed-up learning rates: the step sees them, the script sees its own."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, TensorDataset

import argosy
from argosy.config import ConfigError
from argosy.optim.config import OptimConfig
from argosy.optim.schedule import LearningRate


def one_weight(lr: Any = 0.1, **options: Any) -> tuple[nn.Parameter, SGD]:
    weight = nn.Parameter(torch.zeros(()))
    weight.grad = torch.ones(())
    return weight, SGD([weight], lr=lr, **options)


def steps_of(weight: nn.Parameter, optimizer: Optimizer, count: int, after: Any = None) -> list[float]:
    """How far each step moves a weight whose gradient is 1: the learning rate that the step has used."""
    moved = []
    for _ in range(count):
        before = weight.item()
        optimizer.step()
        moved.append(before - weight.item())
        if after is not None:
            after()
    return moved


def test_nothing_changes_unless_asked() -> None:
    weight, sgd = one_weight()
    rate = LearningRate(OptimConfig()).attach(sgd)
    assert rate.line() is None
    assert steps_of(weight, sgd, 3) == pytest.approx([0.1] * 3)


def test_steps_are_counted_by_gradients_or_as_told() -> None:
    """A stage of frozen layers has none, and counts with the others; a model that is thawed begins to warm up then."""
    closes = iter([False, True] * 2)
    for counts, steps in ((None, 0), (lambda: next(closes), 2)):
        weight, sgd = one_weight()
        weight.grad = None
        rate = LearningRate(OptimConfig(warmup=4)).attach(sgd, counts)
        for _ in range(4):
            sgd.step()
        assert rate.state_dict() == {"steps": steps}


def test_the_linear_rule_warms_up_from_the_scripts_own_rate() -> None:
    weight, sgd = one_weight()
    rate = LearningRate(OptimConfig(lr_scale="linear", warmup=4), 128, 1024).attach(sgd)
    assert rate.line() == (
        "learning rate 0.8 = 0.1 x 8 (lr_scale=linear: batch 1024 / 128), warm-up from 0.1 over 4 steps"
    )
    assert steps_of(weight, sgd, 6) == pytest.approx([0.275, 0.45, 0.625, 0.8, 0.8, 0.8])


def test_the_root_rule_scales_by_the_root() -> None:
    weight, sgd = one_weight()
    rate = LearningRate(OptimConfig(lr_scale="sqrt"), 128, 1024).attach(sgd)
    assert rate.line() == "learning rate 0.282843 = 0.1 x 2.828 (lr_scale=sqrt: the root of batch 1024 / 128)"
    assert steps_of(weight, sgd, 2) == pytest.approx([0.1 * math.sqrt(8)] * 2)


def test_warm_up_alone_rises_from_near_zero() -> None:
    weight, sgd = one_weight()
    rate = LearningRate(OptimConfig(warmup="2epochs"), steps_in=lambda epochs: 2 * epochs).attach(sgd)
    assert rate.line() == "learning rate 0.1, warm-up from 0 over 2 epochs = 4 steps"
    assert steps_of(weight, sgd, 5) == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])


def test_groups_are_scaled_each_from_its_own_rate() -> None:
    weights = [nn.Parameter(torch.zeros(())) for _ in range(2)]
    sgd = SGD([{"params": weights[:1]}, {"params": weights[1:], "lr": 0.01}], lr=0.1)
    rate = LearningRate(OptimConfig(lr_scale="linear"), 10, 40).attach(sgd)
    assert rate.line() == "learning rate 0.4, 0.04 = 0.1, 0.01 x 4 (lr_scale=linear: batch 40 / 10)"
    for weight in weights:
        weight.grad = torch.ones(())
    sgd.step()
    assert [weight.item() for weight in weights] == pytest.approx([-0.4, -0.04])


@pytest.mark.parametrize("tensor", [False, True])
def test_schedulers_read_and_write_the_scripts_own_numbers(tensor: bool) -> None:
    def trained(config: OptimConfig) -> tuple[list[float], list[float]]:
        weight, sgd = one_weight(torch.tensor(0.1) if tensor else 0.1)
        LearningRate(config, 1, 4).attach(sgd)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=10)
        seen: list[float] = []
        moved = steps_of(weight, sgd, 8, lambda: (cosine.step(), seen.append(float(sgd.param_groups[0]["lr"]))))
        return moved, seen

    (plain, own), (scaled, seen) = trained(OptimConfig()), trained(OptimConfig(lr_scale="linear"))
    assert seen == own
    assert scaled == pytest.approx([4 * moved for moved in plain], rel=1e-4)


def test_a_step_that_fails_leaves_the_scripts_rate() -> None:
    weight, sgd = one_weight()
    LearningRate(OptimConfig(lr_scale="linear"), 1, 4).attach(sgd)

    def fail() -> float:
        raise OSError("a closure that fails")

    for _ in range(3):
        with pytest.raises(OSError, match="fails"):
            sgd.step(fail)
    assert steps_of(weight, sgd, 2) == pytest.approx([0.4, 0.4])
    assert sgd.param_groups[0]["lr"] == 0.1


def test_a_rate_that_is_set_during_a_step_stays() -> None:
    _, sgd = one_weight()
    LearningRate(OptimConfig(lr_scale="linear"), 1, 4).attach(sgd)

    def closure() -> float:
        sgd.param_groups[0]["lr"] = 7.0
        return 0.0

    sgd.step(closure)
    assert sgd.param_groups[0]["lr"] == 7.0


def test_steps_without_gradients_do_not_warm_up() -> None:
    weight, sgd = one_weight()
    rate = LearningRate(OptimConfig(warmup=4)).attach(sgd)
    weight.grad = None
    steps_of(weight, sgd, 3)
    assert rate.state_dict() == {"steps": 0}
    weight.grad = torch.ones(())
    assert steps_of(weight, sgd, 1) == pytest.approx([0.025])


def test_the_rule_follows_a_batch_that_grows() -> None:
    batch = 16
    weight, sgd = one_weight()
    rate = LearningRate(OptimConfig(lr_scale="linear"), 16, 64, batch_now=lambda: batch).attach(sgd)
    assert rate.line() == "learning rate 0.4 = 0.1 x 4 (lr_scale=linear: batch 64 / 16, which grows)"
    assert steps_of(weight, sgd, 1) == pytest.approx([0.1])
    batch = 48
    assert steps_of(weight, sgd, 1) == pytest.approx([0.3])


def test_a_restored_warm_up_goes_on() -> None:
    config = OptimConfig(warmup=4)
    weight, sgd = one_weight()
    earlier = LearningRate(config).attach(sgd)
    steps_of(weight, sgd, 2)
    weight, sgd = one_weight()
    later = LearningRate(config).attach(sgd)
    later.load_state_dict(earlier.state_dict())
    assert steps_of(weight, sgd, 3) == pytest.approx([0.075, 0.1, 0.1])


def test_closing_leaves_the_optimizer_to_the_script() -> None:
    weight, sgd = one_weight()
    LearningRate(OptimConfig(lr_scale="linear"), 1, 4).attach(sgd).close()
    assert steps_of(weight, sgd, 1) == pytest.approx([0.1])


def test_rules_without_what_they_compare_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^lr_scale=linear: .*DataLoader"):
        LearningRate(OptimConfig(lr_scale="linear"))
    with pytest.raises(ConfigError, match=r"^warmup=5epochs: .*warmup=500"):
        LearningRate(OptimConfig(warmup="5epochs"))


@pytest.mark.parametrize("order", [("train", "test"), ("test", "train")])
def test_of_several_loaders_that_one_counts_which_the_optimizer_steps_in(
    order: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = argosy.init("warmup=1epochs", run_folder=tmp_path)
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.8)
    data = TensorDataset(torch.ones(80, 1))
    loaders = {"train": DataLoader(data, batch_size=10), "test": DataLoader(data, batch_size=80)}
    net, optimizer, *given = fleet.distribute(net, optimizer, *(loaders[name] for name in order))
    loaders = dict(zip(order, given, strict=True))
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    for (x,) in loaders["test"]:
        net(x)
    for (x,) in loaders["train"]:
        net(x).sum().backward()
        optimizer.step()
    assert rates == pytest.approx([0.1 * step for step in range(1, 9)])
    assert "over 1 epoch = 8 steps" in capsys.readouterr().out
    fleet.close()
