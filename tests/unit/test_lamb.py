"""LAMB does what its paper says, and what torch's own optimizers do around it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from trust_harness import PlainLAMB, Trial

from argosy.optim import LAMB

DEFAULTS = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-6,
    "weight_decay": 0.01,
    "bias_correction": True,
    "trust_max": None,
    "exclude_1d": True,
}
CHOICES: list[dict[str, Any]] = [
    {},
    {"lr": 0.05, "weight_decay": 0.3, "betas": (0.8, 0.95)},
    {"lr": 0.05, "bias_correction": False},
    {"lr": 0.05, "trust_max": 0.5},
    {"lr": 0.05, "exclude_1d": False, "weight_decay": 0.0},
]


@pytest.mark.parametrize("chosen", CHOICES)
def test_many_steps_are_those_of_the_paper(chosen: dict[str, Any]) -> None:
    trial = Trial()
    second = {"lr": 0.02, "weight_decay": 0.2}
    ours = LAMB([{"params": trial.ours[0]}, {"params": trial.ours[1], **second}], **chosen)
    plain = PlainLAMB([{**DEFAULTS, **chosen}, {**DEFAULTS, **chosen, **second}])
    for step in range(40):
        gradients = trial.gradients(step)
        ours.step()
        plain.step(trial.plain, gradients)
        trial.check(rtol=1e-4, atol=1e-5)


def test_without_adaptation_it_is_adam() -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    theirs = copy.deepcopy(ours)
    flat = [nn.Parameter(w.detach().clone().reshape(-1)) for w in ours.parameters()]  # one dimension: not adapted
    lamb, adam = LAMB(flat, lr=0.01, eps=1e-8), torch.optim.Adam(theirs.parameters(), lr=0.01)
    for step in range(10):
        theirs(torch.full((3, 6), 0.1 * step)).square().mean().backward()
        for mine, other in zip(flat, theirs.parameters(), strict=True):
            assert other.grad is not None
            mine.grad = other.grad.detach().clone().reshape(-1)
        lamb.step()
        adam.step()
        adam.zero_grad()
        for mine, other in zip(flat, theirs.parameters(), strict=True):
            torch.testing.assert_close(mine.view_as(other), other)


def test_a_scheduler_moves_the_learning_rate() -> None:
    trial = Trial()
    ours = LAMB([{"params": group} for group in trial.ours], lr=0.1)
    plain = PlainLAMB([{**DEFAULTS} for _ in trial.ours])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(ours, gamma=0.7)
    for step in range(10):
        gradients = trial.gradients(step)
        for group in plain.groups:
            group["lr"] = 0.1 * 0.7**step
        ours.step()
        scheduler.step()
        plain.step(trial.plain, gradients)
        trial.check(rtol=1e-4, atol=1e-5)


def test_a_restored_state_goes_on_as_before() -> None:
    trial = Trial()
    optimizer = LAMB([w for group in trial.ours for w in group], lr=0.1)
    for step in range(3):
        trial.gradients(step)
        optimizer.step()
    other = copy.deepcopy(trial)
    again = LAMB([w for group in other.ours for w in group])
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, stepped in ((trial, optimizer), (other, again)):
        each.gradients(7)
        stepped.step()
    assert all(torch.equal(a, b) for a, b in zip(trial.ours[0], other.ours[0], strict=True))


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = LAMB(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"LAMB.*sparse"):
        optimizer.step()


@pytest.mark.parametrize(
    "wrong", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -0.1}, {"trust_max": 0.0}, {"eps": -1.0}]
)
def test_options_that_cannot_work_are_refused_by_name(wrong: dict[str, Any]) -> None:
    ((name, _),) = wrong.items()
    with pytest.raises(ValueError, match=f"^{name}="):
        LAMB([nn.Parameter(torch.ones(2, 2))], **wrong)
