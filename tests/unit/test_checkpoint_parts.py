"""Models, optimizers and generators get back what a checkpoint keeps of them."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_harness import assert_same
from kept_states import write
from torch import Tensor, nn
from torch.utils.data import DataLoader

from argosy.checkpoint.checkpoints import Checkpoints
from argosy.checkpoint.errors import CheckpointError
from argosy.checkpoint.optimizer import parameter_names
from argosy.checkpoint.parts import state_of
from argosy.checkpoint.random_state import random_state, set_random_state
from argosy.comm.group import SoloGroup
from argosy.data.batches import BatchConfig
from argosy.data.cursor import Cursor
from argosy.data.loader import Loader


class Remembers:
    """A job whose strategy remembers a number."""

    def __init__(self, number: int | None = None) -> None:
        self.number = number
        self.forgotten: list[nn.Module] = []

    def state_dict(self) -> dict[str, Any]:
        return {} if self.number is None else {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state.get("number")

    def forget(self, models: Sequence[nn.Module]) -> None:
        self.forgotten += models


def keeper(number: int | None = None) -> Checkpoints:
    return Checkpoints(SoloGroup(), SoloGroup, "", Remembers(number))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


def test_states_go_by_names_and_not_by_order(folder: Path) -> None:
    one = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    first = torch.optim.Adam(one.parameters(), lr=0.3)
    stepped(one, first)
    keeper().save(folder, {"model": one, "optimizer": first}, [one], step=4)
    other = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    second = torch.optim.Adam(reversed(list(other.parameters())), lr=0.1)
    assert keeper().load(folder, {"model": other, "optimizer": second}, [other]) == 4
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert_same(first.state[ours], second.state[theirs])
    assert second.param_groups[0]["lr"] == 0.3


def test_parameters_of_several_models_and_of_none_have_names() -> None:
    one, two, alone = nn.Linear(2, 2), nn.Linear(2, 2), nn.Parameter(torch.ones(1))
    both = torch.optim.SGD([*one.parameters(), *two.parameters(), alone], lr=0.1)
    names = parameter_names([one, two], both)
    assert [names.get(id(p)) for p in both.param_groups[0]["params"]] == [
        "weight",
        "bias",
        "model2/weight",
        "model2/bias",
        None,
    ]
    only = torch.optim.SGD(two.parameters(), lr=0.1)
    assert sorted(parameter_names([one, two], only).values()) == ["bias", "weight"]


def test_states_of_parameters_in_no_model_go_by_number(folder: Path) -> None:
    def start() -> tuple[Tensor, torch.optim.Optimizer]:
        parameter = nn.Parameter(torch.ones(3))
        return parameter, torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

    (ours, first), (theirs, second) = start(), start()
    ours.grad = torch.arange(3.0)
    first.step()
    keeper().save(folder, {"optimizer": first}, [], step=1)
    keeper().load(folder, {"optimizer": second}, [])
    assert_same(first.state[ours], second.state[theirs])
    model = nn.Linear(1, 1)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match=r"the checkpoint has no weight, bias of optimizer"):
        keeper().load(folder, {"optimizer": other}, [model])


def test_states_keep_their_type(folder: Path) -> None:
    """torch would convert them to the parameter's."""
    model = nn.Linear(4, 4).to(torch.bfloat16)
    optimizer = torch.optim.Adam(model.parameters())
    stepped(model, optimizer)
    exact = torch.randn(4, 4)
    optimizer.state[model.weight]["exp_avg"] = exact
    keeper().save(folder, {"optimizer": optimizer}, [model], step=0)
    again = torch.optim.Adam(model.parameters())
    keeper().load(folder, {"optimizer": again}, [model])
    assert_same(again.state[model.weight]["exp_avg"], exact)


def test_states_that_were_like_their_parameter_are_like_it_again(folder: Path) -> None:
    model, other = nn.Linear(4, 4).to(torch.bfloat16), nn.Linear(4, 4)
    for each in (model, other):
        each.scale = nn.Parameter(torch.ones((), dtype=each.weight.dtype))
    optimizer, again = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    stepped(model, optimizer)
    keeper().save(folder, {"model": model, "optimizer": optimizer}, [model], step=0)
    keeper().load(folder, {"model": other, "optimizer": again}, [other])
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert_same(again.state[theirs]["exp_avg"], optimizer.state[ours]["exp_avg"].float())
        assert_same(again.state[theirs]["step"], torch.tensor(1.0))
    stepped(other, again)


def test_states_of_a_parameter_of_another_shape_are_refused(folder: Path) -> None:
    model, other = nn.Linear(4, 4), nn.Linear(8, 8)
    optimizer, again = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    stepped(model, optimizer)
    keeper().save(folder, {"optimizer": optimizer}, [model], step=0)
    with pytest.raises(CheckpointError, match=r"optimizer: weight has the shape \[4, 4\] .* and \[8, 8\] here"):
        keeper().load(folder, {"optimizer": again}, [other])
    assert not again.state


def test_states_of_other_shapes_than_the_parameters_come_back(folder: Path) -> None:
    model = nn.Linear(4, 6)
    optimizer, again = torch.optim.Adafactor(model.parameters()), torch.optim.Adafactor(model.parameters())
    stepped(model, optimizer)
    keeper().save(folder, {"optimizer": optimizer}, [model], step=0)
    keeper().load(folder, {"optimizer": again}, [model])
    assert tuple(again.state[model.weight]["row_var"].shape) == (6, 1)
    assert_same(optimizer.state_dict(), again.state_dict())


def test_states_without_the_shapes_of_their_parameters_load(folder: Path) -> None:
    """As checkpoints from before these were kept."""
    model = nn.Linear(4, 4)
    optimizer, again = torch.optim.Adam(model.parameters()), torch.optim.Adam(model.parameters())
    stepped(model, optimizer)
    state = state_of(optimizer, [model])
    state["param_groups"][0]["params"] = dict.fromkeys(state["param_groups"][0]["params"])
    write(folder, {"optimizer": state})
    keeper().load(folder, {"optimizer": again}, [model])
    assert_same(optimizer.state_dict(), again.state_dict())


def test_groups_that_differ_are_named(folder: Path) -> None:
    model = nn.Linear(2, 2)
    keeper().save(folder, {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}, [model], step=0)
    apart = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    with pytest.raises(
        CheckpointError, match=r"group 1 of the parameters differs: .* in one group with those of group 0"
    ):
        keeper().load(folder, {"optimizer": apart}, [model])
    with pytest.raises(CheckpointError) as caught:
        keeper().load(folder, {"optimizer": torch.optim.Adam(model.parameters())}, [model])
    assert str(caught.value) == (
        "optimizer: group 0 of the parameters differs: only here: amsgrad, betas, capturable, "
        "decoupled_weight_decay, eps; only in the checkpoint: dampening, momentum, nesterov; "
        "it is another kind of optimizer"
    )


def test_an_optimizer_loads_whether_or_not_it_had_a_scheduler(folder: Path) -> None:
    model = nn.Linear(2, 2)

    def start(scheduled: bool) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if scheduled:
            torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=10)
        return optimizer

    for before, after in ((True, False), (False, True), (True, True)):
        earlier, later = start(before), start(after)
        known = later.param_groups[0].get("initial_lr")
        keeper().save(folder, {"optimizer": earlier}, [model], step=0)
        keeper().load(folder, {"optimizer": later}, [model])
        assert later.param_groups[0]["lr"] == earlier.param_groups[0]["lr"]
        assert later.param_groups[0]["initial_lr"] == earlier.param_groups[0].get("initial_lr", known)


def test_what_is_no_optimizer_in_the_checkpoint_is_named(folder: Path) -> None:
    model = nn.Linear(1, 1)
    write(folder, {"optimizer": {"lr": 1}, "model": [1]})
    with pytest.raises(CheckpointError, match="optimizer in the checkpoint is not the state of an optimizer"):
        keeper().load(folder, {"optimizer": torch.optim.SGD(model.parameters())}, [model])
    with pytest.raises(CheckpointError, match="model is not the state of a model"):
        keeper().load(folder, {"model": model}, [model])


class Extra(nn.Module):
    """A model with a state that is no tensor, and one whose shown tensor is not the one it holds."""

    def __init__(self, words: list[str], scale: float) -> None:
        super().__init__()
        self.words, self.weight = words, nn.Parameter(torch.full((3,), scale))

    def get_extra_state(self) -> dict[str, Any]:
        return {"words": self.words, "table": torch.arange(len(self.words))}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert_same(state["table"], torch.arange(len(state["words"])))
        self.words = state["words"]


def test_a_model_with_a_state_of_its_own_takes_it_back_its_own_way(folder: Path) -> None:
    model, other = Extra(["a", "b"], 2.0), Extra(["c", "d"], 0.0)
    keeper().save(folder, {"model": model}, [], step=0)
    keeper().load(folder, {"model": other}, [])
    assert other.words == ["a", "b"]
    assert_same(model.weight, other.weight.detach())


def test_types_are_converted_as_load_state_dict_does(folder: Path) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2).double()
    keeper().save(folder, {"model": model}, [], step=0)
    keeper().load(folder, {"model": other}, [])
    assert_same(other.weight.detach(), model.weight.detach().double())


def with_buffer(buffer: Tensor) -> nn.Module:
    model = nn.Linear(3, 2)
    model.register_buffer("kept", buffer)
    return model


def test_a_type_that_cannot_hold_the_values_is_refused(folder: Path) -> None:
    def load(saved: Tensor, here: Tensor) -> Tensor:
        keeper().save(folder, {"model": with_buffer(saved)}, [], step=0)
        model = with_buffer(here)
        before = model.weight.detach().clone()
        try:
            keeper().load(folder, {"model": model}, [])
        except CheckpointError:
            assert_same(before, model.weight)
            raise
        return model.kept

    for saved, here in ((torch.tensor(1.7), torch.tensor(0)), (torch.tensor(300), torch.tensor(0).char())):
        with pytest.raises(CheckpointError, match=f"model/kept is {saved.dtype} .* and {here.dtype} here"):
            load(saved, here)
    assert_same(load(torch.tensor(7, dtype=torch.int8), torch.tensor(0)), torch.tensor(7))


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(4)


@pytest.mark.parametrize("extra", [False, True], ids=["filled where it is", "taken back by the model"])
@pytest.mark.parametrize("make", [lambda: torch.ones(1).expand(4), inference], ids=["expanded", "inference"])
def test_a_tensor_that_cannot_be_written_is_named_before_others_are(folder: Path, make: Any, extra: bool) -> None:
    kept = Extra(["a"], 2.0) if extra else nn.Linear(3, 2)
    kept.register_buffer("kept", torch.ones(4))
    keeper().save(folder, {"model": kept}, [], step=0)
    model = Extra(["a"], 0.0) if extra else nn.Linear(3, 2)
    model.register_buffer("kept", make())
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match="model/kept cannot be written here: it"):
        keeper().load(folder, {"model": model}, [])
    assert_same(before, model.weight.detach())


def test_a_conjugate_view_is_filled(folder: Path) -> None:
    values = torch.complex(torch.arange(3.0), torch.ones(3))
    keeper().save(folder, {"model": with_buffer(values)}, [], step=0)
    model = with_buffer(torch.zeros(3, dtype=torch.complex64).conj())
    keeper().load(folder, {"model": model}, [])
    assert_same(model.kept.resolve_conj(), values)


def numbers() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        float(torch.rand(())),
    ]


def test_random_numbers_go_on() -> None:
    numbers()
    state = random_state()
    expected = numbers()
    numbers()
    set_random_state(state)
    assert numbers() == expected


def test_what_goes_on_comes_back_with_an_optimizer_only(folder: Path) -> None:
    model = nn.Linear(2, 2)
    parts = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    keeper(5).save(folder, parts, [model], step=9)
    expected = numbers()
    before = numbers()
    mine = Remembers(1)
    loading = Checkpoints(SoloGroup(), SoloGroup, "", mine)
    assert loading.load(folder, {"model": model}, [model]) is None
    assert (mine.number, mine.forgotten) == (1, [model]), "only what is of this model"
    assert numbers() != expected
    assert loading.load(folder, parts, [model]) == 9
    assert (mine.number, mine.forgotten) == (5, [model])
    assert numbers() == expected
    assert before != expected


def test_a_loader_that_cannot_continue_is_told_before_anything_changes(folder: Path) -> None:
    def start(seed: int) -> tuple[nn.Module, Loader]:
        script = DataLoader(range(96), batch_size=8, shuffle=True)
        return nn.Linear(2, 2), Loader(script, BatchConfig(seed=seed), workers=1, rank=0, cursor=Cursor())

    (model, loader), (other, later) = start(0), start(7)
    next(iter(loader))
    keeper().save(folder, {"model": model, "loader": loader}, [], step=0)
    before = other.weight.detach().clone()
    with pytest.raises(CheckpointError, match="8 samples into an epoch"):
        keeper().load(folder, {"model": other, "loader": later}, [])
    assert_same(before, other.weight.detach())


def test_a_part_that_is_not_there_is_named(folder: Path) -> None:
    model = nn.Linear(2, 2)
    keeper().save(folder, {"model": model}, [model], step=0)
    with pytest.raises(CheckpointError, match="holds model, and no optimizer"):
        keeper().load(folder, {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}, [model])
