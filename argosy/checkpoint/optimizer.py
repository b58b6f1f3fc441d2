"""An optimizer's state by the names of its parameters, so that it fits ranks that hold other ones, or parts of them.

torch numbers the parameters of an optimizer. A pipeline's rank has half of them and numbers those; so in a checkpoint
states are kept under names, and groups of parameters as hyper-parameters and a set of names. What is in no known model
is known by its number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from argosy.checkpoint import tree
from argosy.checkpoint.errors import CheckpointError
from argosy.checkpoint.manifest import TensorEntry
from argosy.checkpoint.shard import DTYPES

Name = str | int
Place = Callable[[str, Tensor], None]  # asks for a stored tensor: its name, and the tensor to fill


def parameter_names(models: Sequence[nn.Module], optimizer: Optimizer) -> dict[int, str]:
    """A name for each parameter of an optimizer, by its id. Of several models, the later ones' have a prefix."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = [model for model in models if any(id(parameter) in held for parameter in model.parameters())]
    names: dict[int, str] = {}
    for number, model in enumerate(trained, 1):
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), name if number == 1 else f"model{number}/{name}")
    return names


class NamedOptimizer:
    """An optimizer as a checkpoint sees it."""

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self._groups: list[list[tuple[Name, Tensor]]] = []
        number = 0
        for group in optimizer.param_groups:
            self._groups.append([])
            for parameter in group["params"]:
                self._groups[-1].append((names.get(id(parameter), number), parameter))
                number += 1
        self._parameters = [pair for group in self._groups for pair in group]

    def names(self) -> list[Name]:
        """The names of the parameters that are here."""
        return [name for name, _ in self._parameters]

    def state(self) -> dict[str, Any]:
        """The optimizer's state dict, by names."""
        given = self._optimizer.state_dict()
        states = {}
        for number, (name, _) in enumerate(self._parameters):
            if number in given["state"]:
                states[name] = given["state"][number]
        groups = {
            number: {**group, "params": {name: None for name, _ in members}}
            for number, (group, members) in enumerate(zip(given["param_groups"], self._groups, strict=True))
        }
        others = {key: value for key, value in given.items() if key not in ("state", "param_groups")}
        return {"state": states, "param_groups": groups, "others": others}

    def load(self, role: str, form: Any, tensors: Mapping[str, TensorEntry], place: Place) -> Callable[[], None]:
        """Ask for what is stored; returns what puts it into the optimizer, once it is there."""
        content = tree.entries(form)
        stored = {name: tree.entries(each) for name, each in tree.entries(content["state"]).items()}
        here = self._optimizer.state_dict()["state"]
        states: dict[int, dict[Any, Any]] = {}
        for number, (name, parameter) in enumerate(self._parameters):
            if name in stored:
                held = here.get(number, {})
                states[number] = {
                    key: tree.join(value, self._taker(tensors, place, parameter, held.get(key)))
                    for key, value in stored[name].items()
                }
        plain = _taking(tensors, place)
        groups = self._matched(
            role, {n: tree.entries(group) for n, group in tree.entries(content["param_groups"]).items()}
        )
        loaded = {"state": states, "param_groups": [], **tree.join(content["others"], plain)}
        number = 0
        for group, members in zip(groups, self._groups, strict=True):
            hyper = {key: tree.join(value, plain) for key, value in group.items() if key != "params"}
            loaded["param_groups"].append({**hyper, "params": list(range(number, number + len(members)))})
            number += len(members)
        return lambda: self._apply(loaded)

    def _apply(self, loaded: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(loaded)
        # torch converts states to the parameter's type; what was saved is what counts.
        for number, state in loaded["state"].items():
            kept = self._optimizer.state.get(self._parameters[number][1], {})
            for key, value in state.items():
                if isinstance(value, Tensor) and isinstance(kept.get(key), Tensor) and kept[key].dtype != value.dtype:
                    kept[key] = value

    def _matched(self, role: str, stored: dict[Name, dict[Name, Any]]) -> list[dict[Name, Any]]:
        """The stored group of each group that is here: the one that has its members."""
        home = {name: number for number, group in stored.items() for name in tree.entries(group["params"])}
        matched: dict[Name, int] = {}
        found = []
        for number, (members, group) in enumerate(zip(self._groups, self._optimizer.param_groups, strict=True)):
            homes = {home[name] for name, _ in members if name in home} or {number}
            (first, *others) = sorted(homes, key=str)
            if others or first in matched or first not in stored:
                why = (
                    f"its parameters are in the groups {', '.join(map(str, sorted(homes, key=str)))} of the checkpoint"
                    if others
                    else f"the checkpoint has no group {first}"
                    if first not in stored
                    else f"the checkpoint has its parameters in one group with those of group {matched[first]}"
                )
                raise CheckpointError(f"{role}: group {number} of the parameters differs: {why}")
            matched[first] = number
            here, there = set(group) - {"params"}, set(stored[first]) - {"params"}
            if here != there:
                odd = sorted(str(key) for key in here ^ there)
                raise CheckpointError(
                    f"{role}: group {number} of the parameters differs: {', '.join(odd)} is only "
                    f"{'here' if here - there else 'in the checkpoint'}; it is another kind of optimizer"
                )
            found.append(stored[first])
        return found

    def _taker(
        self, tensors: Mapping[str, TensorEntry], place: Place, parameter: Tensor, held: Any
    ) -> Callable[[str], Tensor]:
        def take(name: str) -> Tensor:
            target = _target(tensors[name], parameter, held)
            place(name, target)
            return target

        return take


def _target(entry: TensorEntry, parameter: Tensor, held: Any) -> Tensor:
    """Where a stored state goes: the tensor that is there if it fits, or a new one placed as the parameter is."""
    dtype = DTYPES[entry.dtype]
    if isinstance(held, Tensor) and held.dtype == dtype and tuple(held.shape) == entry.shape:
        return held
    # A count of steps stays a plain number, whatever the shape of the parameter.
    if entry.shape and tuple(parameter.shape) == entry.shape:
        return torch.empty_like(parameter.detach(), dtype=dtype, memory_format=torch.contiguous_format)
    return torch.empty(entry.shape, dtype=dtype)


def _taking(tensors: Mapping[str, TensorEntry], place: Place) -> Callable[[str], Tensor]:
    def take(name: str) -> Tensor:
        target = torch.empty(tensors[name].shape, dtype=DTYPES[tensors[name].dtype])
        place(name, target)
        return target

    return take
