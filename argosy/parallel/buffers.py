"""Buffers: what a model keeps beside its parameters, and changes as it sees its worker's samples.

Running statistics, moving averages and the like drift apart on workers that see different samples. Those that have
changed since they were last the same are brought together again with the gradients: floating-point ones by the mean,
weighted by samples, others by taking rank 0's. Those that have not changed are left alone: a mean of equal numbers is
not always that number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from argosy.comm.group import Group
from argosy.parallel.replicas import broadcast_tensor, modules_of


class Buffers:
    """The buffers of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.note()

    def all(self) -> list[Tensor]:
        """Every buffer, once."""
        return self._look()[0]

    def changed(self) -> list[bool]:
        """Which of them have changed here since `note`. Running statistics change without a new version."""
        buffers, running = self._look()
        return [id(b) in running or self._known.get(id(b), (b, -1))[1] != b._version for b in buffers]

    def _look(self) -> tuple[list[Tensor], set[int]]:
        """All buffers, once each, and the ids of those that are statistics of a layer that learns."""
        found: dict[int, Tensor] = {}
        running = set[int]()
        for module in modules_of(self._model):
            found |= {id(buffer): buffer for buffer in module._buffers.values() if buffer is not None}
            if isinstance(module, _NormBase) and module.training:
                running |= {id(module.running_mean), id(module.running_var)}
        return list(found.values()), running

    def note(self) -> None:
        """They are the same on all workers now."""
        # The buffers are held, too: a module may assign another one, which must not be taken for the one before.
        self._known = {id(buffer): (buffer, buffer._version) for buffer in self.all()}


def average(tensors: Iterable[Tensor], weight: float, group: Group) -> None:
    """The mean of tensors, weighted; of whole numbers rank 0's. One exchange for each type of number."""
    by_type: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_type[tensor.dtype].append(tensor)
    for dtype, members in by_type.items():
        flat = torch.cat([member.reshape(-1).cpu() for member in members])
        if dtype.is_floating_point:
            flat = flat.mul_(weight) if weight else flat.zero_()
            group.all_reduce(flat)
        else:
            broadcast_tensor(flat, group)
        for member, part in zip(members, flat.split([member.numel() for member in members]), strict=True):
            member.copy_(part.view_as(member))
