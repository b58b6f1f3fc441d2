"""The plain group: Gloo, through torch.distributed.

It makes torch's default process group, so that DeviceMesh and the user's own torch.distributed calls work too,
or adopts the one the script has already made. Members find each other through the store they are given.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

# Its functions take the default group as a default argument when they are imported. Were that after the group is made
# (an optimizer's first step imports them), they would keep it, and its threads, alive while the interpreter ends.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from argosy.comm.config import CommConfig
from argosy.comm.errors import CommError
from argosy.comm.group import Group, Op
from argosy.comm.pending import DONE, Pending

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


class GlooGroup(Group):
    """All workers of the job, over Gloo."""

    def __init__(self, config: CommConfig, rank: int, size: int, store: Store | None = None) -> None:
        """Join the job. Without a store, the variables that torchrun sets say where the others are."""
        self.rank, self.size = rank, size
        self._config = config
        self._store = store  # torch keeps only the C++ half of a store: the Python half must live as long as the group
        self._host = socket.gethostname()
        self._sequence = 0
        self._owns = not dist.is_initialized()
        if not self._owns:
            if (dist.get_rank(), dist.get_world_size()) != (rank, size):
                raise CommError(
                    f"torch.distributed is already initialised as rank {dist.get_rank()} of "
                    f"{dist.get_world_size()}, and this job has rank {rank} of {size}; "
                    f"call argosy.init() before init_process_group, or leave the latter out"
                )
            return
        deadline = timedelta(seconds=config.timeout_seconds)
        with self._named("join"):
            if store is None:
                dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=size, timeout=deadline)
            else:
                dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=deadline)

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, wait: bool = True) -> Pending:
        """Replace `tensor` on every member by the members' tensors combined; it is done when this returns."""
        with self._named("all_reduce"):
            dist.all_reduce(tensor, _OPS[op])
        return DONE

    def broadcast(self, tensor: Tensor, root: int = 0, *, wait: bool = True) -> Pending:
        """Replace `tensor` on every member by that of `root`; it is done when this returns."""
        with self._named("broadcast"):
            dist.broadcast(tensor, root)
        return DONE

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all members, by rank."""
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._named("all_gather"):
            dist.all_gather(gathered, tensor)
        return gathered

    def barrier(self, *, wait: bool = True) -> Pending:
        """Return when every member has called this."""
        with self._named("barrier"):
            dist.barrier()
        return DONE

    def close(self) -> None:
        """Leave torch's default group, if this object made it."""
        if self._owns and dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def _named(self, operation: str) -> Iterator[None]:
        """Give a failure inside the block its rank, host, operation and sequence number."""
        self._sequence += 1
        try:
            yield
        except RuntimeError as error:
            raise CommError(
                f"{operation} #{self._sequence} failed on rank {self.rank} of {self.size} (host {self._host}): "
                f"{error}. A worker has ended or did not call {operation} within {self._config.timeout_seconds:g} s "
                f"(timeout_seconds); look for the first failure in the other workers' logs"
            ) from error
