"""The objects of a script and their states: what a checkpoint keeps of each, and how it gets it back.

Models are filled where their tensors are, whatever the mesh; optimizers by the names of their parameters; everything
else (schedulers, loaders) through its `load_state_dict`. What does not fit (a key that is missing, left over, of
another shape or kind, or that cannot be written) is named, and nothing has been changed then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from argosy.checkpoint import tree
from argosy.checkpoint.agree import together
from argosy.checkpoint.errors import CheckpointError
from argosy.checkpoint.optimizer import NamedOptimizer, Stored, parameter_names
from argosy.checkpoint.pieces import pieces_of
from argosy.checkpoint.random_state import set_random_state
from argosy.checkpoint.read import Opened, Request, fill
from argosy.checkpoint.shard import DTYPES


def state_of(part: Any, models: Sequence[nn.Module]) -> Any:
    """What a checkpoint keeps of an object."""
    if isinstance(part, Optimizer):
        return NamedOptimizer(part, parameter_names(models, part)).state()
    return part.state_dict()


def load_parts(
    opened: Opened,
    parts: Mapping[str, Any],
    models: Sequence[nn.Module],
    random_of: int | None = None,
) -> None:
    """Give named objects what a checkpoint keeps of them, and the generators what it keeps of a rank's; all or none."""
    loading = Loading(opened, models)

    def prepare() -> dict[str, list[Any]]:
        keys = loading.prepare(parts)
        if random_of is not None:  # the last to be handed over: what the parts do may draw numbers
            loading.prepare_random(random_of)
        return keys

    keys = together(opened.group, prepare)
    together(opened.group, lambda: loading.check_left_over(keys))
    fill(opened, loading.requests)
    together(opened.group, loading.apply)


class Loading:
    """What is to be read from a checkpoint, and what is to be done with it then."""

    def __init__(self, opened: Opened, models: Sequence[nn.Module]) -> None:
        self._opened, self._models = opened, models
        self.requests: list[Request] = []
        self._after: list[Callable[[], Any]] = []
        self._stored: dict[str, list[Any]] = {}  # the keys that the checkpoint has of each model and optimizer

    def prepare(self, parts: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Ask for all that this rank needs; returns the keys that it has of each model and optimizer."""
        stored = self._opened.manifest.parts
        keys = {}
        for role, part in parts.items():
            if role not in stored:
                held = ", ".join(name for name in stored if name != "random")
                raise CheckpointError(f"{self._opened.address} holds {held}, and no {role}")
            if isinstance(part, nn.Module):
                keys[role] = self._prepare_model(role, part, stored[role])
            elif isinstance(part, Optimizer):
                keys[role] = self._prepare_optimizer(role, part, stored[role])
            else:
                value = self._value(stored[role], part.state_dict(), role)
                if hasattr(part, "check_state_dict"):  # while there is nothing to undo; tensors in it are not read yet
                    part.check_state_dict(value)
                self._after.append(lambda part=part, value=value: part.load_state_dict(value))  # type: ignore[misc]
        return keys

    def prepare_random(self, rank: int) -> None:
        """Ask for the random numbers of a rank, if it was there."""
        stored = self._opened.manifest.parts.get("random", {"dict": []})
        form = tree.entries(stored).get(rank)
        if form is not None:
            state = self._value(form, None, "random")
            self._after.append(lambda: set_random_state(state))

    def check_left_over(self, keys: list[dict[str, list[Any]]]) -> None:
        """Refuse a checkpoint that has keys of a model or parameters of an optimizer which no rank has."""
        for role in keys[0]:
            here = {key for each in keys for key in each[role]}
            if extra := [key for key in self._stored[role] if key not in here]:
                raise CheckpointError(f"{self._opened.address}: {role} has no {_some(extra)}, and the checkpoint does")

    def apply(self) -> None:
        """Hand over what has been read."""
        for act in self._after:
            act()

    def _prepare_model(self, role: str, model: nn.Module, form: Any) -> list[Any]:
        try:
            state, stored = model.state_dict(), tree.entries(form)
        except ValueError:
            raise CheckpointError(f"{self._opened.address}: {role} is not the state of a model") from None
        self._stored[role] = list(stored)
        if missing := [key for key in state if key not in stored]:
            raise CheckpointError(f"{self._opened.address}: the checkpoint has no {_some(missing)} of {role}")
        own = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        if all(key in own and _same_place(value, own[key]) for key, value in state.items()):
            for key, value in state.items():
                self._ask(_tensor_name(stored[key], role, key), value)
        else:  # what the model shows is not what it holds: it is to take it back its own way
            fresh = {
                key: torch.empty_like(value) if isinstance(value, Tensor) else value for key, value in state.items()
            }
            loaded = {key: self._value(stored[key], value, key) for key, value in fresh.items()}
            for key, held in own.items():
                if key in state:
                    self._check_writable(f"{role}/{key}", held)
            self._after.append(lambda: model.load_state_dict(loaded))
        return list(state)

    def _prepare_optimizer(self, role: str, optimizer: Optimizer, form: Any) -> list[Any]:
        named = NamedOptimizer(optimizer, parameter_names(self._models, optimizer))
        stored = Stored.of(form, role)
        self._stored[role] = list(stored.members)
        if missing := [name for name in named.names() if name not in stored.members]:
            raise CheckpointError(f"{self._opened.address}: the checkpoint has no {_some(missing)} of {role}")
        self._after.append(named.load(role, stored, self._opened.manifest.tensors, self._ask))
        return list(named.names())

    def _value(self, form: Any, like: Any, role: str) -> Any:
        """A stored value; its tensors are placed as those in `like` are, and are plain where there is none."""
        template: dict[str, Any] = {}
        if like is not None:
            tree.split(like, template, role)

        def take(name: str) -> Any:
            entry = self._opened.manifest.tensors[name]
            held = template.get(name, like if isinstance(like, Tensor) else None)
            if isinstance(held, Tensor) and (isinstance(held, DTensor) or held is like):
                target = held if held is like else torch.empty_like(held, dtype=DTYPES[entry.dtype])
            else:
                target = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
            self._ask(name, target)
            return target

        return tree.join(form, take)

    def _ask(self, name: str, target: Tensor) -> None:
        pieces, entry = pieces_of(target, name), self._opened.manifest.tensors[name]
        if pieces.shape != entry.shape:
            raise CheckpointError(
                f"{self._opened.address}: {name} has the shape {list(entry.shape)} in the checkpoint, and "
                f"{list(pieces.shape)} here"
            )
        if not _converts(DTYPES[entry.dtype], pieces.dtype):
            raise CheckpointError(
                f"{self._opened.address}: {name} is {DTYPES[entry.dtype]} in the checkpoint, and {pieces.dtype} here, "
                f"which cannot hold its values"
            )
        self._check_writable(name, target)
        self.requests.append(Request(name, pieces))

    def _check_writable(self, name: str, target: Tensor) -> None:
        local = target.to_local() if isinstance(target, DTensor) else target
        if local.layout == torch.strided and any(
            size > 1 and stride == 0 for size, stride in zip(local.shape, local.stride(), strict=True)
        ):
            why = "it is expanded, so that several of its elements are one; make it a tensor of its own with clone()"
        elif local.is_inference() and not torch.is_inference_mode_enabled():
            why = "it was made under torch.inference_mode()"
        else:
            return
        raise CheckpointError(f"{self._opened.address}: {name} cannot be written here: {why}")


def _converts(there: torch.dtype, here: torch.dtype) -> bool:
    """Whether a type is converted: whole numbers to one that holds them all, the others as torch's arithmetic does."""
    if there == here or there.is_floating_point or there.is_complex or here.is_floating_point or here.is_complex:
        return torch.can_cast(there, here)
    (low, high), (lowest, highest) = (
        (0, 1) if each == torch.bool else (torch.iinfo(each).min, torch.iinfo(each).max) for each in (there, here)
    )
    return lowest <= low and high <= highest


def _tensor_name(form: Any, role: str, key: str) -> str:
    if not (isinstance(form, dict) and "tensor" in form):
        raise CheckpointError(f"{role}: {key} is a tensor here, and none in the checkpoint")
    return str(form["tensor"])


def _same_place(shown: Any, held: Any) -> bool:
    """Whether filling what a state dict shows fills what the model holds."""
    if not (isinstance(shown, Tensor) and isinstance(held, Tensor)):
        return False
    if isinstance(shown, DTensor) != isinstance(held, DTensor):
        return False
    ours, theirs = (each.to_local() if isinstance(each, DTensor) else each for each in (shown.detach(), held.detach()))
    return ours.data_ptr() == theirs.data_ptr() and ours.shape == theirs.shape and ours.stride() == theirs.stride()


def _some(keys: Sequence[Any]) -> str:
    """A few of many, by name."""
    named = ", ".join(str(key) for key in keys[:10])
    return named if len(keys) <= 10 else f"{named} and {len(keys) - 10} more"
