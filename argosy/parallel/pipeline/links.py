"""Messages between the workers of a pipeline, over a torch group or over the engine's own."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from argosy.comm.engine import EngineGroup

Wait = Callable[[], object]


class Links(ABC):
    """Workers numbered 0 to `size - 1`; this process is `rank`. Messages with the same tag keep their order."""

    rank: int
    size: int

    @abstractmethod
    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Wait:
        """Start to send; the tensor must not change before the wait is over."""

    @abstractmethod
    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> Wait:
        """Start to receive into a tensor."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Replace the tensor on all workers by the root's."""

    @abstractmethod
    def sum(self, tensor: Tensor) -> None:
        """Replace the tensor on all workers by the sum of theirs."""

    def tell(self, told: Any, root: int) -> Any:
        """What the root says, as JSON; the others say None."""
        text = json.dumps(told).encode() if self.rank == root else b""
        length = torch.tensor([len(text)])
        self.broadcast(length, root)
        data = torch.zeros(int(length), dtype=torch.uint8)
        if text:
            data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        self.broadcast(data, root)
        return json.loads(data.numpy().tobytes())


class TorchLinks(Links):
    """Over a group of torch.distributed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Wait:
        """Start to send."""
        return cast(Wait, dist.isend(tensor, group=self.group, group_dst=to, tag=tag).wait)  # type: ignore[union-attr]

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> Wait:
        """Start to receive."""
        return cast(Wait, dist.irecv(tensor, group=self.group, group_src=source, tag=tag).wait)  # type: ignore[union-attr]

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Replace the tensor by the root's."""
        dist.broadcast(tensor, group=self.group, group_src=root)

    def sum(self, tensor: Tensor) -> None:
        """Replace the tensor by the sum."""
        dist.all_reduce(tensor, group=self.group)


class EngineLinks(Links):
    """Over a group of the engine, whose ranks are taken in the order given. It carries what is in the hosts' memory;
    tensors of other devices go through there."""

    def __init__(self, group: EngineGroup, order: tuple[int, ...]) -> None:
        self._group, self._order = group, order
        self.rank, self.size = order.index(group.rank), group.size

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Wait:
        """Start to send."""
        return self._group.send(tensor.cpu(), self._order[to], tag, wait=False).wait

    def receive(self, tensor: Tensor, source: int, tag: int = 0) -> Wait:
        """Start to receive."""
        here = _on_host(tensor)
        wait = self._group.receive(here, self._order[source], tag, wait=False).wait
        return wait if here is tensor else lambda: (wait(), tensor.copy_(here))

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Replace the tensor by the root's."""
        here = tensor.cpu()
        if tensor.numel():
            self._group.broadcast(here, self._order[root])
        if here is not tensor:
            tensor.copy_(here)

    def sum(self, tensor: Tensor) -> None:
        """Replace the tensor by the sum."""
        here = tensor.cpu()
        self._group.all_reduce(here)
        if here is not tensor:
            tensor.copy_(here)


def _on_host(tensor: Tensor) -> Tensor:
    return tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
