"""Which parameters of a model are trained: the script freezes, thaws, adds and replaces them as it likes.

Each that wants a gradient is listened to. The model is looked through when a forward pass begins and when a backward
pass has ended: a script may call its model's parts, or methods of its own, and never the model itself. If a step comes
without a pass that was noticed, it is looked through then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from argosy.parallel.replicas import modules_of


class Trained:
    """The parameters of one model that want, or have wanted, gradients; `names` has their names, in the model's order.

    Workers look at different times, if one alone calls its model in between: the order must not depend on that.
    """

    def __init__(
        self,
        model: nn.Module,
        arrived: Callable[[Tensor], None],
        met: Callable[[str, nn.Parameter], None],
    ) -> None:
        """`arrived` is told of every gradient, `met` of parameters that have a name for the first time."""
        self.names: dict[nn.Parameter, str] = {}
        self.strangers: list[nn.Parameter] = []  # that the model did not have when replicas were made alike
        self._model, self._arrived, self._met = model, arrived, met
        self._known = set(model.parameters())
        self._owners = dict(model.named_parameters())  # who was listened to last, by name
        self._hooks: dict[nn.Parameter, tuple[RemovableHandle, torch.dtype]] = {}
        self._seen: list[tuple[int, bool, torch.dtype]] = []
        self._held: list[nn.Parameter] = []  # those that were seen: another one must not come by the same id
        self.look()

    def look(self) -> bool:
        """Listen to parameters that are new or thawed; whether anything has changed since it was last called."""
        now = self._now()
        seen = [(id(parameter), parameter.requires_grad, parameter.dtype) for parameter in now]
        if seen == self._seen:
            return False
        self._seen, self._held = seen, now
        named = {parameter: name for name, parameter in self._model.named_parameters()}
        for parameter, name in named.items():
            if parameter not in self._known:
                self.strangers.append(parameter)
                self._known.add(parameter)
            if parameter.requires_grad:
                self._listen_to(parameter, name)
        for parameter in self._hooks.keys() - named.keys():  # its layer was replaced
            self._hooks.pop(parameter)[0].remove()
        self.names = {parameter: name for parameter, name in named.items() if parameter in self._hooks}
        new = set(self.strangers)
        self.strangers = [parameter for parameter in named if parameter in new]
        self._known &= named.keys()
        return True

    def close(self) -> None:
        """Listen no more."""
        for hook, _ in self._hooks.values():
            hook.remove()

    def _now(self) -> list[nn.Parameter]:
        own = (parameter for module in modules_of(self._model) for parameter in module._parameters.values())
        return [parameter for parameter in own if parameter is not None]

    def _listen_to(self, parameter: nn.Parameter, name: str) -> None:
        hook, dtype = self._hooks.get(parameter, (None, None))
        if dtype != parameter.dtype:  # with its type, a parameter changes where autograd adds its gradients up
            if hook is not None:
                hook.remove()
            self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._arrived), parameter.dtype
        if self._owners.get(name) is not parameter:
            self._owners[name] = parameter
            self._met(name, parameter)
