"""A group of workers that exchange tensors: the interface that every way to train is written against.

Small on purpose. `EngineGroup` is the implementation, `SoloGroup` a world of one. Tensors are contiguous and on the
CPU; operations work in place, are called by all members in the same order, and leave the same bits on every member.
They return when they are done; `wait=False` only starts them, and what they return is then waited for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor

from argosy.comm.pending import DONE, Pending

Op = Literal["sum", "avg", "min", "max", "prod", "band", "bor", "bxor"]


class Group(ABC):
    """Workers numbered 0 to `size - 1`; this process is `rank`."""

    rank: int
    size: int
    hosts: tuple[int, ...]
    """The number of each member's host: those with the same one share memory."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, wait: bool = True) -> Pending:
        """Replace `tensor` on every member by the members' tensors combined."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int = 0, *, wait: bool = True) -> Pending:
        """Replace `tensor` on every member by that of `root`."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all members, by rank. They have the same shape and type."""

    @abstractmethod
    def barrier(self, *, wait: bool = True) -> Pending:
        """Return when every member has called this."""

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor where this group reduces it fastest."""
        return torch.empty(shape, dtype=dtype)

    def findings(self) -> list[tuple[str, dict[str, Any]]]:
        """Events that tell what the group has found out about its links, and what it does about it."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Leave the group and give back what it holds. Calling it twice is harmless."""

    def all_numbers(self, mine: float) -> list[float]:
        """The numbers that the members gave, by rank."""
        return [float(each) for each in self.all_gather(torch.tensor([mine], dtype=torch.float64))]

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

    rank, size, hosts = 0, 1, (0,)

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, wait: bool = True) -> Pending:
        """Nothing to combine with."""
        return DONE

    def broadcast(self, tensor: Tensor, root: int = 0, *, wait: bool = True) -> Pending:
        """Nobody to send to."""
        return DONE

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """This worker's tensor alone."""
        return [tensor.clone()]

    def barrier(self, *, wait: bool = True) -> Pending:
        """Nobody to wait for."""
        return DONE

    def close(self) -> None:
        """Nothing is held."""
