"""An optimizer is made with a model's parameters; sharding and tensor parallelism replace these by DTensors.

What the optimizer holds is replaced with them: its groups, and its states if it has taken steps. The objects
that the script knows, the optimizer and the dicts of its groups, stay, so that schedulers go on working.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary


class Replaced:
    """What has become of each parameter that a model had.

    >>> import torch
    >>> net, replaced = nn.Linear(2, 1), Replaced()
    >>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> with replaced.watching(net):
    ...     net.weight = nn.Parameter(torch.zeros(1, 2))
    >>> replaced.swap(optimizer)
    >>> optimizer.param_groups[0]["params"][0] is net.weight
    True
    """

    def __init__(self) -> None:
        # Weakly: what nobody holds any more, its optimizer included, need not be replaced, and is to be freed.
        self._new: MutableMapping[Tensor, Tensor] = WeakIdKeyDictionary()

    def watching(self, model: nn.Module) -> _Watch:
        """Around what replaces a model's parameters."""
        return _Watch(self, model)

    def note(self, old: Tensor, new: Tensor) -> None:
        """A parameter has become another."""
        if old is not new:
            self._new[old] = new

    def swap(self, optimizer: Optimizer) -> None:
        """Give an optimizer the parameters that are now in the place of those that it was made with."""
        for group in optimizer.param_groups:
            group["params"] = [self._latest(parameter) for parameter in group["params"]]
        for old in [key for key in optimizer.state if key in self._new]:
            state, new = optimizer.state.pop(old), self._latest(old)
            optimizer.state[new] = {
                name: _like(value, new) if isinstance(value, Tensor) and value.shape == new.shape else value
                for name, value in state.items()
            }

    def _latest(self, parameter: Tensor) -> Tensor:
        while parameter in self._new:
            parameter = self._new[parameter]
        return parameter


class _Watch:
    def __init__(self, replaced: Replaced, model: nn.Module) -> None:
        self._replaced, self._model = replaced, model

    def __enter__(self) -> None:
        named = self._model.named_parameters(remove_duplicate=False)
        self._before = {name: weakref.ref(parameter) for name, parameter in named}

    def __exit__(self, *_: object) -> None:
        after = dict(self._model.named_parameters(remove_duplicate=False))
        for name, seen in self._before.items():
            if name in after and (old := seen()) is not None:
                self._replaced.note(old, after[name])


def _like(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole state, laid out as its parameter is. Each worker has the whole: nothing is sent."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value, mesh, placements, src_data_rank=None)
