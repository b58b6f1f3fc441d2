"""Steps are fused where the script has left that open, and compute what torch's others compute."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from argosy.optim.fused import Fused

Make = Callable[..., Optimizer]
OPTIMIZERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3))


def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    optimizer.zero_grad()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(number))
    model(x).square().mean().backward()
    optimizer.step()


class Seen:
    """Which optimizers' groups were fused while they stepped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[bool] = []
        for name in ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_"):
            monkeypatch.setattr(torch, name, self._watched(getattr(torch, name)))

    def _watched(self, kernel: Callable[..., None]) -> Callable[..., None]:
        def watched(*arguments: Any, **words: Any) -> None:
            self.steps.append(True)
            kernel(*arguments, **words)

        return watched


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_steps_are_those_of_torch(seen: Seen, name: str) -> None:
    make, words = OPTIMIZERS[name]
    models = [net(), net()]
    optimizers = [make(model.parameters(), **words) for model in models]
    fused = Fused(optimizers[0])
    for number in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            step(model, optimizer, number)
        assert [group["fused"] for group in optimizers[0].param_groups] == [None]
    assert len(seen.steps) == 5
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    # Torch's own goes on from its state.
    fused.close()
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    models[1].load_state_dict(models[0].state_dict())
    for model, optimizer in zip(models, optimizers, strict=True):
        step(model, optimizer, 9)
    assert len(seen.steps) == 5
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of two ranks, of which this process is one; nothing is sent in a step."""
    dist.init_process_group("fake", rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_of_divided_parameters_are_fused_too(seen: Seen, mesh: DeviceMesh, name: str) -> None:
    make, words = OPTIMIZERS[name]
    rows = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    whole = [nn.Parameter(each.clone()) for each in rows]
    divided = [nn.Parameter(DTensor.from_local(each.clone(), mesh, [Shard(0)])) for each in rows]
    optimizers = [make(parameters, foreach=None, **words) for parameters in (divided, whole)]
    Fused(optimizers[0])
    for number in range(4):
        for mine, theirs in zip(divided, whole, strict=True):
            theirs.grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
            mine.grad = DTensor.from_local(theirs.grad, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    assert len(seen.steps) == 4
    group = optimizers[0].state_dict()["param_groups"][0]
    assert (group["fused"], group["foreach"]) == (None, None)
    for mine, theirs in zip(divided, whole, strict=True):
        assert mine.shape == (8, 3)
        torch.testing.assert_close(mine.to_local(), theirs, rtol=1e-5, atol=1e-6)


def test_divided_parameters_that_cannot_be_fused_are_stepped_at_once(seen: Seen, mesh: DeviceMesh) -> None:
    parameters = [nn.Parameter(DTensor.from_local(torch.ones(4, 3), mesh, [Shard(0)])) for _ in range(2)]
    optimizer = torch.optim.RMSprop(parameters, lr=0.1)
    Fused(optimizer)
    told = []
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    foreach = torch._foreach_mul_
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_foreach_mul_", lambda *given: (told.append(len(given[0])), foreach(*given)))
        optimizer.step()
    assert told == [2]
    assert not seen.steps
    assert optimizer.param_groups[0]["foreach"] is None


def test_divided_and_whole_parameters_in_one_group_are_left_to_torch(seen: Seen, mesh: DeviceMesh) -> None:
    parameters = [nn.Parameter(DTensor.from_local(torch.ones(4, 3), mesh, [Shard(0)])), nn.Parameter(torch.ones(5))]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    Fused(optimizer)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not seen.steps
    assert torch.equal(parameters[1].detach(), torch.full((5,), 0.9))


def test_hooks_see_the_scripts_own_choice_for_divided_parameters_too(mesh: DeviceMesh) -> None:
    parameter = nn.Parameter(DTensor.from_local(torch.ones(4, 3), mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    Fused(optimizer)
    told: list[object] = []
    optimizer.register_step_pre_hook(lambda each, *_: told.append(each.param_groups[0]["foreach"]))
    parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        optimizer.step()
    assert told == [None, None]


class Own(Optimizer):
    """Somebody's own, that knows `foreach=` and no `lr`."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"foreach": None})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data -= parameter.grad


def test_optimizers_of_others_are_left_alone() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = Own([parameter])
    Fused(optimizer)
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.zeros(3))


def test_no_closure_may_be_given_as_none(seen: Seen) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    Fused(optimizer)
    parameter.grad = torch.ones(3)
    optimizer.step(None)
    optimizer.step(closure=None)
    assert len(seen.steps) == 2


@pytest.mark.parametrize("words", [{"foreach": True}, {"foreach": False}, {"fused": False}, {"lr": torch.tensor(0.1)}])
def test_what_the_script_has_chosen_stays(seen: Seen, words: dict[str, Any]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.1, **words})
    before = copy.deepcopy({key: optimizer.param_groups[0][key] for key in ("foreach", "fused")})
    Fused(optimizer)
    step(model, optimizer, 0)
    assert not seen.steps
    assert {key: optimizer.param_groups[0][key] for key in before} == before


def test_what_fused_steps_cannot_take_is_left_to_torch(seen: Seen) -> None:
    table, transposed = nn.Embedding(9, 4, sparse=True), nn.Parameter(torch.randn(5, 4).t())
    groups = [{"params": [parameter]} for parameter in (table.weight, transposed, nn.Parameter(torch.randn(3)))]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    Fused(optimizer)
    before = [parameter.detach().clone() for group in groups for parameter in group["params"]]
    (table(torch.tensor([1, 2])).sum() + transposed.square().sum() + groups[2]["params"][0].sum()).backward()
    optimizer.step()
    assert seen.steps == [True]  # of the third
    for group, old in zip(groups, before, strict=True):
        (parameter,) = group["params"]
        assert isinstance(parameter.grad, Tensor)
        torch.testing.assert_close(parameter.detach(), old - 0.1 * parameter.grad.to_dense())


@pytest.mark.parametrize("name", ["nesterov", "adam", "adagrad"])
def test_states_may_lie_in_another_order_than_parameters(seen: Seen, name: str) -> None:
    """As those do that were saved with a model in channels_last."""
    make, words = OPTIMIZERS[name]
    told = []
    for fuses in (False, True):
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(4, 3, 5, 2))
        optimizer = make([parameter], **words)
        if fuses:
            Fused(optimizer)
        for number in range(4):
            parameter.grad = torch.randn(4, 3, 5, 2, generator=torch.Generator().manual_seed(number))
            optimizer.step()
            for key, kept in optimizer.state[parameter].items():
                if number == 1 and isinstance(kept, Tensor) and kept.dim():
                    optimizer.state[parameter][key] = kept.to(memory_format=torch.channels_last)
        told.append(parameter.detach())
    assert len(seen.steps) == 2
    torch.testing.assert_close(*told, rtol=1e-5, atol=1e-6)


def test_momentum_of_a_layer_that_joins_later(seen: Seen) -> None:
    models = [net(), net()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    Fused(optimizers[0])
    for number in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            model[2].requires_grad_(number > 0)
            step(model, optimizer, number)
    assert len(seen.steps) == 3  # not the one in which one layer has momentum and the other not
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_a_step_that_raises_leaves_no_trace_in_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Fused(optimizer)

    def fail(*_: object, **words: object) -> None:
        raise RuntimeError("no step today")

    monkeypatch.setattr(torch, "_fused_sgd_", fail)
    with pytest.raises(RuntimeError, match="no step today"):
        step(model, optimizer, 0)
    assert optimizer.state_dict()["param_groups"][0]["fused"] is None


def test_hooks_of_the_script_come_first_and_see_its_own_choice(seen: Seen) -> None:
    """One that gives zeros to parameters without a gradient decides whether momentum begins for all at once."""
    models = [net(), net()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    Fused(optimizers[0])
    told: list[object] = []

    def give_zeros(optimizer: Optimizer, *_: object) -> None:
        told.append(optimizer.param_groups[0]["fused"])
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    for number in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            if number == 2:
                optimizer.register_step_pre_hook(give_zeros)
                optimizer.register_step_post_hook(lambda each, *_: told.append(each.param_groups[0]["fused"]))
            model[0].requires_grad_(number > 2)
            step(model, optimizer, number)
    assert len(seen.steps) == 3
    assert set(told) == {None}
    for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
