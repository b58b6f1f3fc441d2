"""Checkpoints: what was saved comes back bit for bit, or an error says why; never anything else."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_harness import BASE, STRANGE, State, again, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_states import read, write
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader

from argosy.checkpoint import tree
from argosy.checkpoint.errors import CheckpointError
from argosy.checkpoint.parts import load_parts, state_of
from argosy.checkpoint.read import open_checkpoint
from argosy.checkpoint.roles import roles
from argosy.comm.group import SoloGroup
from argosy.data.batches import BatchConfig
from argosy.data.cursor import Cursor
from argosy.data.loader import Loader

# What comes back.


def values(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.text(max_size=3) | st.integers()
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(keys, inner, max_size=3)
        ),
        max_leaves=12,
    )


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
TENSORS = st.integers(0, 5).map(torch.arange)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(value=values(PLAIN | TENSORS))
def test_any_nested_values_are_taken_apart_and_joined(value: Any) -> None:
    tensors: dict[str, Tensor] = {}
    form = json.loads(json.dumps(tree.split(value, tensors, "")))
    assert_same(value, tree.join(form, tensors.__getitem__))
    assert tree.merge(form, form) == form


@pytest.mark.parametrize("tensor", STRANGE.values(), ids=STRANGE.keys())
def test_any_tensor_comes_back_bit_for_bit(folder: Path, tensor: Tensor) -> None:
    assert_same(tensor, again(folder, {"x": tensor})["x"])


def test_tensors_that_share_memory_come_back_each_for_itself(folder: Path) -> None:
    state = {"all": BASE, "row": BASE[0], "flat": BASE.view(-1), "again": BASE, "none": BASE[:0], "nothing": BASE[4:]}
    assert_same(state, again(folder, state))


def test_keys_that_look_alike_are_told_apart(folder: Path) -> None:
    state = {
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2), "b'": torch.tensor(3)},
        "a.b'": torch.tensor(4),
        "1": torch.tensor(5),
        1: torch.tensor(6),
        "": {"": torch.tensor(7)},
        ".": torch.tensor(8),
        "__metadata__": torch.tensor(9),
    }
    assert_same(state, again(folder, state))


class Tied(nn.Module):
    """Input and output embeddings are one and the same, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(x)))


def test_training_continues_as_if_it_had_not_stopped(folder: Path) -> None:
    class Training:
        def __init__(self) -> None:
            self.model = Tied()
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
            self.scheduler = schedulers.OneCycleLR(self.optimizer, max_lr=0.2, total_steps=40)
            script = DataLoader(range(8), batch_size=3, shuffle=True)
            self.loader = Loader(script, BatchConfig(), workers=1, rank=0, cursor=Cursor())
            self.parts = roles((self.model, self.optimizer, self.scheduler, self.loader))

        def epoch(self) -> None:
            for x in self.loader:
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(x), (x + 1) % 8).backward()
                self.optimizer.step()
                self.scheduler.step()

        def states(self) -> State:
            return {role: part.state_dict() for role, part in self.parts.items()}

    earlier, later = Training(), Training()
    earlier.epoch()
    earlier.epoch()
    write(folder, {role: state_of(part, [earlier.model]) for role, part in earlier.parts.items()})
    load_parts(open_checkpoint(folder, SoloGroup()), later.parts, [later.model])
    assert_same(earlier.states(), later.states())
    assert later.model.head.weight is later.model.embed.weight
    earlier.epoch()
    later.epoch()
    assert_same(earlier.states(), later.states())


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: schedulers.StepLR(optimizer, 2),
    "multi step": lambda optimizer: schedulers.MultiStepLR(optimizer, [2, 4, 6]),
    "cosine": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 9),
    "cyclic": lambda optimizer: schedulers.CyclicLR(optimizer, 0.1, 0.2, 3),
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "sequence": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.LinearLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)], [4]
    ),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_schedulers_continue(folder: Path, make: Callable[[Any], Any]) -> None:
    def start() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        return optimizer, make(optimizer)

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any) -> Iterator[float]:
        for _ in range(5):
            optimizer.step()
            scheduler.step()
            yield optimizer.param_groups[0]["lr"]

    earlier, later = start(), start()
    list(rates(*earlier))
    write(folder, {"optimizer": state_of(earlier[0], []), "scheduler": earlier[1].state_dict()})
    load_parts(open_checkpoint(folder, SoloGroup()), {"optimizer": later[0], "scheduler": later[1]}, [])
    assert list(rates(*later)) == list(rates(*earlier))


# What is refused.


@pytest.mark.parametrize(
    "value",
    [len, lambda: None, object(), {1, 2}, b"bytes", 1j, np.ones(2), np.int64(3), torch.float32, Path("x")],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_data_is_refused_where_it_stands(folder: Path, value: object) -> None:
    write(folder, {"model": {"lr": 1}})
    with pytest.raises(CheckpointError, match=rf"optimizer/groups/#0/rule.*{type(value).__name__}"):
        write(folder, {"model": {"lr": 2}, "optimizer": {"groups": [{"rule": value}]}})
    assert read(folder) == {"model": {"lr": 1}}


@pytest.mark.parametrize("state", [len, {"rule": len}, {len: 1}], ids=["itself", "in it", "as a key"])
def test_the_object_that_cannot_be_saved_is_named(folder: Path, state: Any) -> None:
    with pytest.raises(CheckpointError, match="optimizer"):
        write(folder, {"model": {"lr": 1}, "optimizer": state})


@pytest.mark.parametrize("key", [(1, 2), None, 1.5, True], ids=repr)
def test_keys_other_than_text_and_whole_numbers_are_refused(folder: Path, key: Any) -> None:
    with pytest.raises(CheckpointError) as caught:
        again(folder, {"inner": {key: 1}})
    assert "inner" in str(caught.value)
    assert f"the key {key!r}" in str(caught.value)


def test_objects_are_named_for_what_they_are() -> None:
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, plateau = schedulers.StepLR(optimizer, 1), schedulers.ReduceLROnPlateau(optimizer)
    loader = Loader(DataLoader(range(3)), BatchConfig(), workers=1, rank=0, cursor=Cursor())
    named = roles((loader, model, scheduler, other, optimizer, plateau))
    assert named == {
        "loader": loader,
        "model": model,
        "model2": other,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "scheduler2": plateau,
    }


def test_classes_that_are_named_like_a_second_object_are_kept_apart() -> None:
    class Ema:
        state_dict = load_state_dict = dict

    class Ema2(Ema):
        pass

    parts = (Ema(), Ema(), Ema2(), Ema2())
    assert list(roles(parts).values()) == list(parts)


def test_other_objects_have_no_name_in_a_checkpoint() -> None:
    with pytest.raises(TypeError, match="not dict"):
        roles((nn.Linear(1, 1), {}))
    with pytest.raises(TypeError, match=r"fleet\.save"):
        roles(())
