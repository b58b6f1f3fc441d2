"""Buffers: what a model keeps beside its parameters, and changes as it sees its worker's samples.

Running statistics, moving averages and the like drift apart on workers that see different samples. Those that have
changed since they were last the same are brought together again with the gradients: floating-point ones by the mean,
weighted by samples, others by taking rank 0's. Those that have not changed are left alone: a mean of equal numbers is
not always that number.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

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
        """Every buffer that may drift, but the counters."""
        return self._look()[0]

    def counters(self) -> list[Tensor]:
        """How many batches each layer has seen: mostly the same on all workers, and a number to compare."""
        return self._look()[2]

    def changed(self) -> list[bool]:
        """Which of them have changed here since `note`. Running statistics change without a new version."""
        buffers, running, _ = self._look()
        return [id(b) in running or self._known.get(id(b), (b, -1))[1] != b._version for b in buffers]

    def _look(self) -> tuple[list[Tensor], set[int], list[Tensor]]:
        """All buffers but counters, once each; ids of those that are statistics of a layer that learns; counters."""
        found: dict[int, Tensor] = {}
        counters: dict[int, Tensor] = {}
        running = set[int]()
        for module in modules_of(self._model):
            found |= {id(buffer): buffer for buffer in module._buffers.values() if buffer is not None}
            if isinstance(module, _NormBase):
                if module.num_batches_tracked is not None:
                    counters[id(module.num_batches_tracked)] = module.num_batches_tracked
                if module.training:
                    running |= {id(module.running_mean), id(module.running_var)}
        others = [buffer for number, buffer in found.items() if number not in counters]
        return others, running, list(counters.values())

    def note(self) -> None:
        """They are the same on all workers now."""
        # The buffers are held, too: a module may assign another one, which must not be taken for the one before.
        self._known = {id(buffer): (buffer, buffer._version) for buffer in self.all()}


def agree_on_counts(counters: Sequence[Tensor], totals: Sequence[float], workers: int) -> None:
    """Where workers have counted differently, as around a branch that some take, all get the mean, rounded down."""
    for counter, total in zip(counters, totals, strict=True):
        if total != workers * int(counter):
            counter.fill_(int(total) // workers)


def average(tensors: Iterable[Tensor], weight: float, group: Group) -> None:
    """The mean of tensors, weighted, in one exchange for each type of number; of whole numbers rank 0's."""
    by_type: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_type[tensor.dtype].append(tensor)
    for dtype, members in by_type.items():
        if not dtype.is_floating_point:
            for member in members:
                broadcast_tensor(member, group)
            continue
        flat = torch.cat([member.reshape(-1).cpu() for member in members])
        flat = flat.mul_(weight) if weight else flat.zero_()
        group.all_reduce(flat)
        for member, part in zip(members, flat.split([member.numel() for member in members]), strict=True):
            member.copy_(part.view_as(member))
