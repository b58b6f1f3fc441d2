"""Gradients and replicas where a script calls the parts of its model, and never the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launching import FORKED, succeed
from ranks import Place, run
from together import TINY, Together, batch, net, squares
from torch import Tensor, nn

from argosy.parallel.data import DataParallel


def through_its_parts(model: nn.Module, x: Tensor) -> Tensor:
    """The loss of a model whose own forward is never called."""
    y = x
    for part in model.children():
        y = part(y)
    return y.square().mean()


def check_thawed_without_a_forward(place: Place) -> None:
    both = Together(place, net())
    for step in range(4):
        for model in (both.model, both.alone):
            if step == 1:
                model[0].requires_grad_(False)  # it was listened to before
            if step == 2:
                model[0].requires_grad_(True)
        if step == 3:  # and one that nobody has listened to
            for model in (both.model, both.alone):
                torch.manual_seed(8)
                model[0] = nn.Linear(model[0].in_features, model[0].out_features)
        both.backward(through_its_parts if step else squares, batch(step)[: sum(both.shares)], step=step)
        both.check()
        both.zero_grad()


def test_parameters_that_change_are_noticed_though_the_model_is_never_called() -> None:
    run(check_thawed_without_a_forward, 2)


def check_only_new_parameters(place: Place) -> None:
    """A new head for a model that is frozen: no gradient comes of a parameter that anybody listens to."""
    both = Together(place, net())
    optimizers = []
    for model in (both.model, both.alone):
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
        if model is both.model:
            both.parallel.attach(optimizers[0])
        model.requires_grad_(False)
        torch.manual_seed(8)
        model[4] = nn.Linear(30, 2)
        optimizers[-1].add_param_group({"params": list(model[4].parameters())})
    for step in range(3):
        both.backward(through_its_parts, batch(step)[: sum(both.shares)], step=step)
        for optimizer in optimizers:
            optimizer.step()
        weights = both.group.all_gather(both.model[4].weight.detach())
        assert torch.equal(*weights), step
        both.check()
        both.zero_grad()


def test_a_step_of_new_parameters_alone_is_noticed() -> None:
    run(check_only_new_parameters, 2)


def check_looked_at_by_one(place: Place) -> None:
    both = Together(place, net())
    for step in range(4):
        for model in (both.model, both.alone):
            model[0].requires_grad_(step != 1)
        if place.rank == 0:
            with torch.no_grad():
                both.model(batch())  # for a log, say
        both.backward(through_its_parts, batch(step)[: sum(both.shares)], step=step)
        both.check()
        both.zero_grad()


def test_a_worker_may_look_at_what_the_model_says_alone() -> None:
    run(check_looked_at_by_one, 2)


def check_late_in_a_sum(place: Place, accumulate: int) -> None:
    both = Together(place, net())
    both.parallel.close()
    both.model[0].requires_grad_(False)
    both.parallel = DataParallel(both.model, both.group, both.cursor, 0, TINY, accumulate=accumulate)
    part = both.mine(batch()[: sum(both.shares)])
    if accumulate == 1:
        with both.parallel.no_sync():
            through_its_parts(both.model, part).backward()
        both.model[0].requires_grad_(True)
        both.begin(step=1)
    else:
        both.model[0].requires_grad_(True)
        both.begin(merged=16, closes=False, step=0)
        through_its_parts(both.model, part).backward()
        both.begin(merged=16, closes=True, step=1)
    with pytest.raises(RuntimeError, match=r"0\.weight was thawed, added or replaced"):
        through_its_parts(both.model, part).backward()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_would_be_lost_of_a_sum_is_an_error(accumulate: int) -> None:
    run(check_late_in_a_sum, 2, accumulate)


def check_after_a_failure(place: Place, again: bool) -> None:
    both = Together(place, net())

    def fail(gradient: Tensor) -> Tensor:
        raise ValueError("boom")

    for step in range(3):
        if step == 1:
            both.begin(step=step)
            loss = through_its_parts(both.model, both.mine(batch(step)[: sum(both.shares)]))
            hook = both.model[0].weight.register_hook(fail)
            with pytest.raises(ValueError, match="boom"):
                loss.backward(retain_graph=True)
            hook.remove()
            both.model.zero_grad()
            if not again:
                continue
            loss.backward()
            through_its_parts(both.alone, batch(step)[: sum(both.shares)]).backward()
        else:
            both.backward(through_its_parts, batch(step)[: sum(both.shares)], step=step)
        both.check()
        both.zero_grad()


@pytest.mark.parametrize("again", [True, False])
def test_a_failed_pass_is_forgotten_though_the_model_is_never_called(again: bool) -> None:
    run(check_after_a_failure, 2, again)


def check_looks_between_changes(place: Place) -> None:
    """One worker alone calls its model between two changes: what is reduced together stays the same everywhere."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
    model[:2].requires_grad_(False)
    both = Together(place, model)
    for number in (1, 0):
        for each in (both.model, both.alone):
            each[number].requires_grad_(True)
        if place.rank == 0:
            both.model(torch.randn(2, 6))
    both.backward(squares, torch.randn(sum(both.shares), 6, generator=torch.Generator().manual_seed(0)))
    both.check()
    for number in (2, 1):  # and layers that are new, with numbers of each worker's own
        torch.manual_seed(place.rank)
        both.model[number] = nn.Linear(6, 6)
        if place.rank == 0:
            both.model(torch.randn(2, 6))
    both.zero_grad()
    both.begin(step=1)
    squares(both.model, torch.randn(both.shares[place.rank], 6)).backward()
    for parameter in both.model.parameters():
        assert torch.equal(*both.group.all_gather(parameter.detach()))


def test_workers_agree_on_buckets_whenever_they_look_at_their_models() -> None:
    run(check_looks_between_changes, 2)


NEW_HEAD = """
import torch
from torch import nn
import argosy

fleet = argosy.init()
torch.manual_seed(1)
net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
net.requires_grad_(False)
net, optimizer = fleet.distribute(net, torch.optim.SGD(net.parameters(), lr=1.0))
net[2] = nn.Linear(4, 4)
optimizer.add_param_group({"params": list(net[2].parameters())})
before = net[2].weight.detach().clone()
if fleet.rank == 0:  # the other worker has no gradient of it
    net[2](net[1](net[0](torch.ones(3, 4)))).sum().backward()
optimizer.step()
print("moved", [int(row) for row in (net[2].weight.detach() != before).all(1)])
fleet.close()
"""


def test_gradients_that_a_step_catches_up_are_divided_as_others_are(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(NEW_HEAD)
    done = succeed([*FORKED, "run", "--workers", "2", "--strategy", "shard_stage=1", script])
    assert done.out.count("moved [1, 1, 1, 1]") == 2
