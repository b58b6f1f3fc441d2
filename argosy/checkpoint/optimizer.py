"""An optimizer's state by the names of its parameters, so that it fits ranks that hold other ones, or parts of them.

torch numbers the parameters of an optimizer. A pipeline's rank has half of them and numbers those; so in a checkpoint
states are kept under names, and groups of parameters as hyper-parameters and a set of names. What is in no known model
is known by its number. Beside each name stands the parameter's shape and type, so that a state that is as its parameter
was becomes as the parameter is here, and one of a parameter of another shape is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from argosy.checkpoint import tree
from argosy.checkpoint.errors import CheckpointError, reason
from argosy.checkpoint.manifest import TensorEntry
from argosy.checkpoint.shard import DTYPES

Name = str | int
Place = Callable[[str, Tensor], None]  # asks for a stored tensor: its name, and the tensor to fill
# What torch's schedulers leave in an optimizer's groups: they may come and go between two runs.
_OF_SCHEDULERS: Final = frozenset(("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"))


@dataclass(frozen=True)
class Member:
    """A parameter as it was saved: its group, its shape and its type (None in checkpoints from before these)."""

    group: Name
    shape: tuple[int, ...] | None
    dtype: str | None


@dataclass(frozen=True)
class Stored:
    """What a checkpoint keeps of an optimizer: forms of states and of groups, and the parameters that it had."""

    states: dict[Name, dict[Name, Any]]
    groups: dict[Name, dict[Name, Any]]
    members: dict[Name, Member]
    others: Any

    @classmethod
    def of(cls, form: Any, role: str) -> Stored:
        """What the form of `NamedOptimizer.state` says."""
        try:
            content = tree.entries(form)
            states = {name: tree.entries(each) for name, each in tree.entries(content["state"]).items()}
            groups = {number: tree.entries(each) for number, each in tree.entries(content["param_groups"]).items()}
            members = {}
            for number, group in groups.items():
                for name, each in tree.entries(group.pop("params")).items():
                    saved = tree.entries(each) if each is not None else {"shape": None, "dtype": None}
                    shape = tree.join(saved["shape"], _no_tensor)
                    members[name] = Member(number, tuple(shape) if shape is not None else None, saved["dtype"])
            return cls(states, groups, members, content["others"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{role} in the checkpoint is not the state of an optimizer: {reason(error)}"
            ) from error


def _no_tensor(name: str) -> Any:
    raise ValueError(f"{name} is a tensor")


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
            number: {**group, "params": {name: _described(each) for name, each in members}}
            for number, (group, members) in enumerate(zip(given["param_groups"], self._groups, strict=True))
        }
        others = {key: value for key, value in given.items() if key not in ("state", "param_groups")}
        return {"state": states, "param_groups": groups, "others": others}

    def load(self, role: str, stored: Stored, tensors: Mapping[str, TensorEntry], place: Place) -> Callable[[], None]:
        """Ask for what is stored; returns what puts it into the optimizer, once it is there."""
        here = self._optimizer.state_dict()["state"]
        states: dict[int, dict[Any, Any]] = {}
        for number, (name, parameter) in enumerate(self._parameters):
            saved = stored.members[name]
            if saved.shape is not None and saved.shape != tuple(parameter.shape):
                raise CheckpointError(
                    f"{role}: {name} has the shape {list(saved.shape)} in the checkpoint, and "
                    f"{list(parameter.shape)} here"
                )
            if name in stored.states:
                held = here.get(number, {})
                states[number] = {
                    key: tree.join(value, _taking(tensors, place, _Like(str(key), parameter, saved, held.get(key))))
                    for key, value in stored.states[name].items()
                }
        plain = _taking(tensors, place)
        groups = self._matched(role, stored)
        loaded = {"state": states, "param_groups": [], **tree.join(stored.others, plain)}
        number = 0
        for form, group, members in zip(groups, self._optimizer.param_groups, self._groups, strict=True):
            kept = {key: value for key, value in group.items() if key in _OF_SCHEDULERS and key not in form}
            hyper: dict[Any, Any] = {key: tree.join(value, plain) for key, value in form.items()}
            loaded["param_groups"].append({**hyper, **kept, "params": list(range(number, number + len(members)))})
            number += len(members)
        return lambda: self._apply(loaded)

    def _apply(self, loaded: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(loaded)
        # torch converts all states to the parameter's type, also those that had one of their own when they were saved.
        for number, state in loaded["state"].items():
            kept = self._optimizer.state.get(self._parameters[number][1], {})
            for key, value in state.items():
                if isinstance(value, Tensor) and isinstance(kept.get(key), Tensor) and kept[key].dtype != value.dtype:
                    kept[key] = value

    def _matched(self, role: str, stored: Stored) -> list[dict[Name, Any]]:
        """The stored group of each group that is here: the one that has its members."""
        matched: dict[Name, int] = {}
        found = []
        for number, (members, group) in enumerate(zip(self._groups, self._optimizer.param_groups, strict=True)):
            homes = {stored.members[name].group for name, _ in members} or {number}
            (first, *others) = sorted(homes, key=str)
            if others or first in matched or first not in stored.groups:
                why = (
                    f"its parameters are in the groups {', '.join(map(str, sorted(homes, key=str)))} of the checkpoint"
                    if others
                    else f"the checkpoint has no group {first}"
                    if first not in stored.groups
                    else f"the checkpoint has its parameters in one group with those of group {matched[first]}"
                )
                raise CheckpointError(f"{role}: group {number} of the parameters differs: {why}")
            matched[first] = number
            here, there = (set(map(str, keys)) - {"params"} - _OF_SCHEDULERS for keys in (group, stored.groups[first]))
            if here != there:
                only = [(here - there, "here"), (there - here, "in the checkpoint")]
                told = "; ".join(f"only {where}: {', '.join(sorted(keys))}" for keys, where in only if keys)
                raise CheckpointError(
                    f"{role}: group {number} of the parameters differs: {told}; it is another kind of optimizer"
                )
            found.append(stored.groups[first])
        return found


@dataclass(frozen=True)
class _Like:
    """What a stored state is to be like: its key, its parameter here and as it was saved, and what is here so far."""

    key: str
    parameter: Tensor
    saved: Member
    held: Any

    def target(self, entry: TensorEntry) -> Tensor:
        """Where a stored state goes: the tensor that is there if it fits, or a new one placed as the parameter is."""
        dtype, parameter = DTYPES[entry.dtype], self.parameter
        # Counters are not like their parameter, whatever its shape; torch tells this one by its name, too.
        alike = entry.shape == tuple(parameter.shape) and self.key != "step"
        if alike and str(dtype) == self.saved.dtype:
            dtype = parameter.dtype
        if isinstance(self.held, Tensor) and self.held.dtype == dtype and tuple(self.held.shape) == entry.shape:
            return self.held
        if alike:
            return torch.empty_like(parameter.detach(), dtype=dtype, memory_format=torch.contiguous_format)
        return torch.empty(entry.shape, dtype=dtype)


def _taking(tensors: Mapping[str, TensorEntry], place: Place, like: _Like | None = None) -> Callable[[str], Tensor]:
    def take(name: str) -> Tensor:
        entry = tensors[name]
        target = torch.empty(entry.shape, dtype=DTYPES[entry.dtype]) if like is None else like.target(entry)
        place(name, target)
        return target

    return take


def _described(parameter: Tensor) -> dict[str, Any]:
    return {"shape": list(parameter.shape), "dtype": str(parameter.dtype)}
