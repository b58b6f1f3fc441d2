"""DGC's steps in training: they are SGD's own, whatever hooks there are and however the model changes."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from ranks import Place
from test_sparse_sums import run
from torch import Tensor, nn

from argosy.compress.descent import Landed
from argosy.compress.dgc import DgcCodec
from argosy.data.cursor import Cursor
from argosy.parallel.data import DataParallel


def steps_with_hooks(place: Place, touches: bool) -> dict[str, Tensor]:
    """Training whose hooks look at gradients before and after a step; if it `touches` them, SGD makes the steps."""
    group, cursor = place.join(), Cursor()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(600, 700), nn.ReLU(), nn.Linear(700, 300), nn.ReLU(), nn.Linear(300, 400))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    seen: list[int] = []

    def look(*_: object) -> None:
        seen.append(sum(parameter.grad is not None for parameter in model.parameters()))

    optimizer.register_step_post_hook(look)  # before ours
    codec = DgcCodec(0.99, warmup_epochs=0, exchange="sparse")
    parallel = DataParallel(model, group, cursor, codec=codec)
    codec.attach(dict(model.named_parameters()), optimizer)
    optimizer.register_step_pre_hook(look)  # and behind ours
    taken = [0]
    descend = Landed.descend

    def counted(landed: Landed, parameter: nn.Parameter, rate: float) -> bool:
        done = descend(landed, parameter, rate)
        taken[0] += done
        return done

    Landed.descend = counted  # type: ignore[method-assign]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(8, 600, generator=torch.Generator().manual_seed(10 * step + place.rank))
        model(x).square().mean().backward()
        if touches:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(1.0)
        optimizer.step()
        schedule.step()
    parallel.close()
    Landed.descend = descend  # type: ignore[method-assign]
    assert taken[0] == (0 if touches else 12)  # of one that is a bucket, and of two that share one with small ones
    assert seen == [6] * 8
    return {name: value.detach() for name, value in model.named_parameters()}


def test_steps_where_numbers_have_landed_are_sgds_own() -> None:
    short, whole = (run(steps_with_hooks, 2, touches) for touches in (False, True))
    for told in (*short, *whole):
        assert all(torch.equal(told[name], whole[0][name]) for name in told)


def a_model_that_changes(place: Place, how: str) -> None:
    """All is sent, so that momentum and weight decay are SGD's own, also those of layers that come later."""
    group = place.join()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 600))
    first = model[2]
    models = (model, copy.deepcopy(model))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9, weight_decay=0.05) for each in models]
    codec = DgcCodec(0.999, warmup_epochs=0, exchange="dense")
    parallel = DataParallel(model, group, Cursor(), codec=codec)
    codec.attach(dict(model.named_parameters()), optimizers[0])

    def steps() -> None:
        for step in range(3):
            x = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))  # the same on all workers
            for each, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                each(x).square().mean().backward()
                optimizer.step()
        for mine, theirs in zip(model.parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)

    def take(layers: Sequence[nn.Module]) -> None:
        for each, optimizer, layer in zip(models, optimizers, layers, strict=True):
            if how == "grows":
                each.append(layer)
            else:
                each[2] = layer
            optimizer.add_param_group({"params": list(layer.parameters())})

    steps()
    torch.manual_seed(5)
    layer = nn.Linear(600, 40) if how == "grows" else nn.Linear(30, 600)
    firsts = [each[2] for each in models]
    take([layer, copy.deepcopy(layer)])
    steps()
    if how == "is replaced and comes back":
        assert firsts[0] is first
        for each, optimizer, old in zip(models, optimizers, firsts, strict=True):
            each[2] = old
            for parameter in old.parameters():  # momentum under its name was another layer's: both begin anew
                optimizer.state.pop(parameter, None)
        steps()
    parallel.close()


@pytest.mark.parametrize("how", ["grows", "is replaced", "is replaced and comes back"])
def test_layers_that_come_later_have_momentum_too(how: str) -> None:
    run(a_model_that_changes, 2, how)
