"""Momentum and weight decay, taken over from SGD: DGC applies both to gradients before they are sent.

While the optimizer steps, its param groups say that there is neither; after the step they say again what the user
wrote, so schedulers that change them, and checkpoints, see nothing of it. torch calls no hook after a step that raises:
what was set aside then is given back before the next step, and before the optimizer's state is saved. Several models,
each with a codec, may share an optimizer: what is set aside belongs to the optimizer.

What is left of SGD then, p -= lr * g, is done here for gradients that are nearly all zeros (`descent.py`). SGD passes
over these: during its step they are away. So that other hooks see them, ours come last before a step and first after.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from argosy.compress.descent import Landed
from argosy.optim.step_hooks import StepHooks

_TAKEN: Final = ("momentum", "dampening", "weight_decay")
_Group = dict[str, Any]
_Aside = list[tuple[_Group, dict[str, Any]]]
_ASIDE: Final[WeakKeyDictionary[Optimizer, _Aside]] = WeakKeyDictionary()


class TakenOver:
    """The hyperparameters of SGD for each parameter of a model, and the hooks that keep them from SGD itself."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
        self._parameters, self.optimizer = dict(parameters), optimizer
        self._unused: set[str] = set()  # whose gradients were made for the next step
        self._aside = _ASIDE.setdefault(optimizer, [])
        self._groups: dict[int, _Group] = {}
        self._landed: dict[str, Landed] = {}
        self._away: list[tuple[str, Tensor]] = []
        self._hooks = StepHooks(optimizer, self._take, self._stepped)
        self._saving = optimizer.register_state_dict_pre_hook(lambda *_: self._give_back())
        self.look()

    def close(self) -> None:
        """Leave the optimizer to itself."""
        self._give_back()
        self._hooks.remove()
        self._saving.remove()

    def look(self) -> None:
        """Learn which group each parameter is in: groups may be added, and are new objects when a state is loaded."""
        check_optimizer(self.optimizer)
        self._groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        self._hooks.come_nearest()
        self._landed.clear()
        self._away.clear()

    def meet(self, name: str, parameter: nn.Parameter) -> None:
        """The model has got another parameter of this name."""
        self._parameters[name] = parameter

    def knows(self, name: str) -> bool:
        """Whether the optimizer has this parameter."""
        return name in self._parameters and id(self._parameters[name]) in self._groups

    def hyperparameters(self, name: str) -> tuple[float, bool, float]:
        """Momentum, whether it is Nesterov's, and weight decay, also while the optimizer steps (with a closure)."""
        group = self._groups[id(self._parameters[name])]
        taken = next((values for other, values in self._aside if other is group), group)
        return float(taken["momentum"]), bool(group["nesterov"]), float(taken["weight_decay"])

    def flat(self, name: str) -> Tensor:
        """A parameter's numbers one behind the other, as gradients lie in a bucket."""
        return self._parameters[name].detach().to("cpu", torch.float32).contiguous().view(-1)

    def momenta(self) -> dict[str, Tensor]:
        """The momentum that SGD itself has built up, as with a checkpoint of a run without DGC; SGD has it no more."""
        taken = {}
        for name in self._parameters:
            buffer = self.optimizer.state.get(self._parameters[name], {}).pop("momentum_buffer", None)
            if buffer is not None and self.knows(name):
                momentum, nesterov, _ = self.hyperparameters(name)
                taken[name] = buffer * momentum if nesterov else buffer  # Nesterov's u is momentum times SGD's buffer
        return taken

    def use(self, names: Iterable[str]) -> None:
        """Momentum takes in gradients of these parameters: once for each step, lest it counts some of them twice."""
        known = {name for name in names if self.knows(name)}
        if twice := sorted(known & self._unused):
            raise RuntimeError(
                f"compress=dgc has got another gradient of {twice[0]} before the optimizer's step: it has taken the "
                f"first one into its momentum, and cannot add the two up; backward the sum of the losses, or put "
                f"all backward passes but the last into fleet.no_sync(); freeze a model that only passes gradients on "
                f"(requires_grad_(False)); a step cannot be left out, as when its loss is not finite"
            )
        self._unused |= known

    def land(self, name: str, landed: Landed) -> None:
        """Of a parameter's gradient, it is known where it is not zero."""
        self._landed[name] = landed

    def forget(self) -> None:
        """The step will not come: its backward pass has failed."""
        self._unused.clear()
        self._landed.clear()

    def _take(self, has_closure: bool) -> None:
        self._give_back()
        self._bring_back()
        self._groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        for group in self.optimizer.param_groups:
            self._aside.append((group, {key: group[key] for key in _TAKEN}))
            group.update(dict.fromkeys(_TAKEN, 0))
        if has_closure or not self._hooks.are_nearest:
            return  # closures, and hooks that are still to come, look at gradients
        for name, landed in self._landed.items():
            parameter = self._parameters[name]
            if self.knows(name) and landed.is_whole(parameter) and parameter.grad is not None:
                self._away.append((name, parameter.grad))
                parameter.grad = None

    def _stepped(self) -> None:
        for name in self._bring_back():
            parameter = self._parameters[name]
            self._landed[name].descend(parameter, float(self._groups[id(parameter)]["lr"]))
        self._landed.clear()
        self._unused.clear()
        self._give_back()

    def _bring_back(self) -> list[str]:
        """Gradients that were away for a step, also for one that has raised."""
        names = []
        for name, gradient in self._away:
            if self._parameters[name].grad is None:
                self._parameters[name].grad = gradient
                names.append(name)
        self._away.clear()
        return names

    def _give_back(self) -> None:
        for group, values in self._aside:
            group.update(values)
        self._aside.clear()


def return_momenta(
    parameters: Mapping[str, nn.Parameter], optimizers: Iterable[Optimizer], momenta: Mapping[str, Tensor]
) -> set[str]:
    """The other way: let SGD go on with the momentum that a run with DGC has built up; whose it has taken.

    It is loaded, as from a checkpoint: states may be divided among workers.
    """
    names, taken = {id(parameter): name for name, parameter in parameters.items()}, set()
    for optimizer in optimizers:
        if type(optimizer) is not torch.optim.SGD:
            continue
        state = optimizer.state_dict()
        held = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
        for number, (parameter, group) in enumerate(held):
            momentum = momenta.get(names.get(id(parameter), ""))
            if momentum is None or not group["momentum"] or momentum.numel() != parameter.numel():
                continue
            buffer = momentum.view(parameter.shape) / (group["momentum"] if group["nesterov"] else 1)
            state["state"].setdefault(number, {})["momentum_buffer"] = buffer
            taken.add(names[id(parameter)])
        optimizer.load_state_dict(state)
    return taken


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse all but SGD, and SGD with what DGC's momentum does not have."""
    if type(optimizer) is not torch.optim.SGD:
        raise ValueError(
            f"compress=dgc works with torch.optim.SGD, not with {type(optimizer).__name__}: it applies momentum "
            f"and weight decay itself, before gradients are sent, and what another optimizer would make of "
            f"gradients that arrive late and bundled is unknown; use torch.optim.SGD, or another codec, such as "
            f"compress=powersgd or compress=int8"
        )
    reasons = {
        "dampening": "its momentum has no dampening; use dampening=0",
        "maximize": "it adds weight decay to gradients that are descended; negate the loss instead",
        "differentiable": "its momentum is computed outside of autograd; use differentiable=False",
    }
    for number, group in enumerate(optimizer.param_groups):
        for key, reason in reasons.items():
            if group[key]:
                raise ValueError(f"compress=dgc cannot work with {key}={group[key]} (param group {number}): {reason}")
