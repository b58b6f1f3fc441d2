"""LARS does what its paper says, and what torch's own optimizers do around it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from trust_harness import PlainLARS, Trial

from argosy.optim import LARS

DEFAULTS = {
    "lr": 1.0,
    "momentum": 0.9,
    "weight_decay": 0.0,
    "trust_coefficient": 0.001,
    "eps": 1e-8,
    "nesterov": False,
    "exclude_1d": True,
}
CHOICES: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "nesterov": True},
    {"momentum": 0.0, "weight_decay": 0.01},
    {"exclude_1d": False, "weight_decay": 0.1, "trust_coefficient": 0.1, "eps": 0.0},
]


@pytest.mark.parametrize("chosen", CHOICES)
def test_many_steps_are_those_of_the_paper(chosen: dict[str, Any]) -> None:
    trial = Trial()
    second = {"lr": 0.3, "trust_coefficient": 0.02}
    ours = LARS([{"params": trial.ours[0]}, {"params": trial.ours[1], **second}], **chosen)
    plain = PlainLARS([{**DEFAULTS, **chosen}, {**DEFAULTS, **chosen, **second}])
    for step in range(40):
        gradients = trial.gradients(step)
        ours.step()
        plain.step(trial.plain, gradients)
        trial.check()


def test_the_learning_rate_of_a_scheduler_is_inside_the_momentum() -> None:
    trial = Trial()
    ours = LARS([{"params": group} for group in trial.ours], lr=2.0, weight_decay=0.05)
    plain = PlainLARS([{**DEFAULTS, "weight_decay": 0.05} for _ in trial.ours])
    scheduler = torch.optim.lr_scheduler.StepLR(ours, step_size=2, gamma=0.3)
    for step in range(12):
        gradients = trial.gradients(step)
        for group in plain.groups:
            group["lr"] = 2.0 * 0.3 ** (step // 2)
        ours.step()
        scheduler.step()
        plain.step(trial.plain, gradients)
        trial.check()


def test_large_models_are_stepped_in_parts_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trial(), Trial()
    for trial, cached in zip(trials, (1, 1 << 30), strict=True):
        monkeypatch.setattr("argosy.optim.trust._CACHED", cached)
        optimizer = LARS([w for group in trial.ours for w in group], weight_decay=0.1)
        for step in range(3):
            trial.gradients(step)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(trials[0].ours[0], trials[1].ours[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_of_other_types_are_stepped_in_their_type(dtype: torch.dtype) -> None:
    trial = Trial(dtype=dtype)
    ours = LARS([{"params": group} for group in trial.ours], weight_decay=0.1, trust_coefficient=0.1)
    plain = PlainLARS([{**DEFAULTS, "weight_decay": 0.1, "trust_coefficient": 0.1} for _ in trial.ours])
    for step in range(3):
        gradients = trial.gradients(step)
        ours.step()
        plain.step(trial.plain, gradients)
    trial.check(*((0.05, 0.05) if dtype is torch.bfloat16 else (1e-12, 1e-12)))
    assert all(w.dtype == dtype for group in trial.ours for w in group)


def test_a_learning_rate_may_be_a_tensor() -> None:
    trials = Trial(), Trial()
    for trial, lr in zip(trials, (0.7, torch.tensor(0.7)), strict=True):
        optimizer = LARS([w for group in trial.ours for w in group], lr=lr, weight_decay=0.1)
        trial.gradients(0)
        optimizer.step()
    for a, b in zip(trials[0].ours[0], trials[1].ours[0], strict=True):
        torch.testing.assert_close(a, b)


def test_a_restored_state_goes_on_as_before() -> None:
    trial = Trial()
    optimizer = LARS([w for group in trial.ours for w in group], weight_decay=0.1)
    for step in range(3):
        trial.gradients(step)
        optimizer.step()
    other = copy.deepcopy(trial)
    again = LARS([w for group in other.ours for w in group], lr=99.0)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, stepped in ((trial, optimizer), (other, again)):
        each.gradients(7)
        stepped.step()
    assert all(torch.equal(a, b) for a, b in zip(trial.ours[0], other.ours[0], strict=True))


def test_a_closure_is_run_with_gradients_and_its_loss_comes_back() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    optimizer = LARS(net.parameters(), lr=0.01)

    def closure() -> float:
        optimizer.zero_grad()
        loss = net(torch.ones(2, 3)).square().mean()
        loss.backward()
        return float(loss.detach())

    first = optimizer.step(closure)
    assert first is not None
    assert closure() < first


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = LARS(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"LARS.*\(10, 4\) is sparse.*sparse=False"):
        optimizer.step()


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"momentum": 1.0}, {"weight_decay": -0.1}, {"trust_coefficient": 0.0}, {"eps": -1.0}]
)
def test_options_that_cannot_work_are_refused_by_name(wrong: dict[str, float]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"^{name}={value}: "):
        LARS([nn.Parameter(torch.ones(2, 2))], **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nesterov=True: it needs momentum"):
        LARS([nn.Parameter(torch.ones(2, 2))], momentum=0.0, nesterov=True)
