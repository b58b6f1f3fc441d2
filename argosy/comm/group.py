"""A group of workers that exchange tensors: the interface that every way to train is written against.

Small on purpose. `GlooGroup` is the plain implementation over torch.distributed, `SoloGroup` a world of one;
a faster one has only these operations to offer. Tensors are contiguous and on the CPU; operations work in place,
are called by all members in the same order, and leave the same bits on every member.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

Op = Literal["sum", "min", "max", "prod"]


class CommError(RuntimeError):
    """A collective operation that failed: on which rank and host, which operation, and its number."""

    echo = True  # most often another worker's failure is the reason, and the one to show


class Group(ABC):
    """Workers numbered 0 to `size - 1`; this process is `rank`."""

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        """Replace `tensor` on every member by the members' tensors combined."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Replace `tensor` on every member by that of `root`."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all members, by rank. They have the same shape and type."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every member has called this."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group and give back what it holds. Calling it twice is harmless."""

    def broadcast_bytes(self, data: bytes | None, root: int = 0) -> bytes:
        """The bytes that `root` gave; the other members give None."""
        length = torch.tensor([len(data) if data is not None else 0])
        self.broadcast(length, root)
        payload = torch.empty(int(length), dtype=torch.uint8)
        if data:
            payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if len(payload):
            self.broadcast(payload, root)
        return payload.numpy().tobytes()


class SoloGroup(Group):
    """A world of one: every operation leaves its tensor as it is."""

    rank, size = 0, 1

    def all_reduce(self, tensor: Tensor, op: Op = "sum") -> None:
        """Nothing to combine with."""

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Nobody to send to."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """This worker's tensor alone."""
        return [tensor.clone()]

    def barrier(self) -> None:
        """Nobody to wait for."""

    def close(self) -> None:
        """Nothing is held."""
