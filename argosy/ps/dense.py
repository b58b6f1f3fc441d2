"""Dense parameters on servers: the optimizer's parameters live there, split in ranges, and workers have copies.

In place of each `optimizer.step()` a worker pushes its gradient, one flat vector for each group of parameters, and
pulls what the servers have made of it and of the others'. The optimizer itself finds no gradient to step with. Its
learning rate is read at every step, so schedulers of it work as they are. Parameters that want no gradient when the
optimizer is distributed stay as they are.

Under `geo` the worker steps by itself, and what is pushed every k steps is the difference, divided by the workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from argosy.comm.group import Group
from argosy.ps.dense_rule import ADD, bears_nothing, dense_rule, settings
from argosy.ps.remote import RemoteStore


class ServedParameters:
    """The parameters of one optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        store: RemoteStore,
        group: Group,
        names: Mapping[nn.Parameter, str] | None = None,
        rejects: bool = True,
    ) -> None:
        """`names` of parameters are for errors; `rejects`: a gradient that is not finite is one."""
        self._store, self._optimizer, self._rejects = store, optimizer, rejects
        self._flats = [_Flat(each["params"], names or {}) for each in optimizer.param_groups]
        self._settings = [settings(each) for each in optimizer.param_groups]
        for number, (flat, each) in enumerate(zip(self._flats, optimizer.param_groups, strict=True)):
            _open(store, number, self._rule(optimizer, each), flat, group)
        self._workers = group.size
        self._taken()

    def _rule(self, optimizer: Optimizer, group: dict[str, Any]) -> bytes:
        return dense_rule(optimizer, group)

    def push(self, *, empty: bool = False) -> None:
        """Hand the gradients over, and leave none for the optimizer. A batch may be empty: then there are none."""
        self._check_unchanged()
        for number, (flat, group) in enumerate(zip(self._flats, self._optimizer.param_groups, strict=True)):
            if not empty and not bears_nothing(self._optimizer, group):
                flat.check_gradients(number)
            pulled = flat.values() if self._store.compensates else None
            gradients = flat.take_gradients()
            if self._rejects and not empty:
                flat.check_finite()
            self._store.push_vector(number, gradients, float(group["lr"]), pulled)

    def has(self, parameters: Set[nn.Parameter]) -> bool:
        """Whether any of these is on the servers."""
        return any(parameter in parameters for flat in self._flats for parameter in flat.parameters)

    def load(self, group: Group) -> None:
        """Let the servers have what the first worker's parameters are now, and a new state. All workers call it."""
        self._store.settle()
        group.barrier()
        if group.rank == 0:
            for number, flat in enumerate(self._flats):
                self._store.set_vector(number, flat.values())
        group.barrier()
        self.look()

    @property
    def remembers(self) -> bool:
        """Whether servers keep more than the parameters: moments, say."""
        return type(self._optimizer) is not SGD or any(group["momentum"] for group in self._optimizer.param_groups)

    def _check_unchanged(self) -> None:
        for flat in self._flats:
            flat.check_unchanged()
        groups = self._optimizer.param_groups
        if len(groups) != len(self._settings):
            raise RuntimeError(
                f"the optimizer had {len(self._settings)} groups of parameters when it was distributed, and has "
                f"{len(groups)}: add them before, or use dense=allreduce"
            )
        for number, (group, before) in enumerate(zip(groups, self._settings, strict=True)):
            for name, was in before.items():
                if group[name] != was:
                    raise RuntimeError(
                        f"{name} of group {number} was {was} when the optimizer was distributed, and is {group[name]}: "
                        f"servers follow the learning rate only; keep it (OneCycleLR(cycle_momentum=False), say), or "
                        f"use dense=allreduce"
                    )

    def pull(self) -> None:
        """Take what the parameters have become, for the next step."""
        for number, flat in enumerate(self._flats):
            flat.put(self._store.pull_vector(number, flat.numbers))
        self._taken()

    def _taken(self) -> None:
        """The parameters are the servers'."""

    def look(self) -> None:
        """Take what the parameters are, between loops."""
        for number, flat in enumerate(self._flats):
            flat.put(self._store.pull_vector(number, flat.numbers, in_step=False))


class AveragedParameters(ServedParameters):
    """Parameters that a worker steps by itself, and brings together with the others' when they meet."""

    def _taken(self) -> None:
        self._bases = [flat.values() for flat in self._flats]

    def _rule(self, optimizer: Optimizer, group: dict[str, Any]) -> bytes:
        return ADD

    def push(self, *, empty: bool = False) -> None:
        """Hand over this worker's part of the mean of all differences."""
        self._sent = [flat.values() for flat in self._flats]
        for number, (values, base) in enumerate(zip(self._sent, self._bases, strict=True)):
            self._store.push_vector(number, (values - base) / self._workers, 1.0)

    def ask(self) -> None:
        """Ask for what has become of what was pushed."""
        self._asked = [self._store.start_vector(number) for number in range(len(self._flats))]

    def take(self) -> None:
        """Take it, and add what this worker has learnt since."""
        for number, (flat, asked) in enumerate(zip(self._flats, self._asked, strict=True)):
            self._bases[number] = self._store.finish_vector(flat.numbers, asked)
            flat.put(self._bases[number] + (flat.values() - self._sent[number]))


class _Flat:
    """Several parameters as one vector."""

    def __init__(self, parameters: list[nn.Parameter], names: Mapping[nn.Parameter, str]) -> None:
        parameters = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in parameters:
            if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
                raise TypeError(
                    f"{_name(parameter, names)} is {parameter.dtype} on {parameter.device}: servers keep float32 of "
                    f"CPUs; use model.float().cpu(), or dense=allreduce"
                )
        self.parameters, self._names = parameters, names
        self.numbers = sum(parameter.numel() for parameter in parameters)
        self._gradients = torch.zeros(self.numbers)
        self._versions = [parameter._version for parameter in parameters]  # when they were the servers'

    def values(self) -> Tensor:
        return torch.cat([torch.empty(0), *(parameter.detach().reshape(-1) for parameter in self.parameters)])

    def check_unchanged(self) -> None:
        """Refuse to go on with parameters that were written to: the servers, who have not seen it, would undo it."""
        for parameter, version in zip(self.parameters, self._versions, strict=True):
            if parameter._version != version:
                raise RuntimeError(
                    f"{_name(parameter, self._names)} was changed by other means than the optimizer, and servers hold "
                    f"it: load checkpoints with fleet.load, or load, clamp and the like before distribute(), or use "
                    f"dense=allreduce"
                )

    def check_gradients(self, group: int) -> None:
        """Refuse a parameter without a gradient, where servers would not leave it as torch does."""
        for parameter in self.parameters:
            if parameter.grad is None:
                raise RuntimeError(
                    f"{_name(parameter, self._names)}, in group {group}, has no gradient in this step: an optimizer "
                    f"would leave it alone, and servers would step it, by weight decay or momentum; freeze it with "
                    f"requires_grad_(False) before distribute(), give the optimizer only what is used, or use "
                    f"dense=allreduce"
                )

    def take_gradients(self) -> Tensor:
        """The gradients; zeros where there are none. Parameters have none afterwards."""
        begin = 0
        for parameter in self.parameters:
            part = self._gradients[begin : begin + parameter.numel()].view(parameter.shape)
            gradient, parameter.grad = parameter.grad, None
            part.zero_() if gradient is None else part.copy_(gradient.to_dense())
            begin += parameter.numel()
        return self._gradients

    def check_finite(self) -> None:
        """Refuse to hand over what would spoil the parameters of all workers."""
        if math.isfinite(float(self._gradients.sum())):
            return
        parts = self._gradients.split([parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            if not bool(part.isfinite().all()):
                raise FloatingPointError(
                    f"the gradient of {_name(parameter, self._names)} is not finite: this step is not made; "
                    f"not_finite=count leaves such gradients out"
                )

    def put(self, values: Tensor) -> None:
        begin = 0
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.copy_(values[begin : begin + parameter.numel()].view(parameter.shape))
                begin += parameter.numel()
        self._versions = [parameter._version for parameter in self.parameters]


def _name(parameter: nn.Parameter, names: Mapping[nn.Parameter, str]) -> str:
    return f"parameter {names[parameter]}" if parameter in names else f"a parameter of shape {tuple(parameter.shape)}"


def _open(store: RemoteStore, number: int, rule: bytes, flat: _Flat, group: Group) -> None:
    """Make the ranges, with what the first worker's parameters are; the others see them when all have met."""
    store.open_vector(number, rule, flat.numbers)
    if group.rank == 0:
        store.set_vector(number, flat.values())
    group.barrier()
    flat.put(store.pull_vector(number, flat.numbers))
