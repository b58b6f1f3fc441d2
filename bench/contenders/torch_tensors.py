"""What contenders on torch share: the store where they meet, divided models, and operations that reduce in place."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from models import step_of, task
from serving import Operation, Seat, serve
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

PATIENCE = timedelta(seconds=60)


def meet(seat: Seat) -> dist.Store:
    """The store of a crew, which rank 0 serves; each worker has one thread."""
    torch.set_num_threads(1)
    where, port = seat.store.rsplit(":", 1)
    return dist.TCPStore(where, int(port), seat.size, is_master=seat.rank == 0, timeout=PATIENCE)


def train_divided(divide: Callable[[nn.Module, DeviceMesh], object], foreach: bool | None) -> None:
    """Steps of a model that is divided among all ranks of a crew, on Gloo, with SGD that is `foreach`, or as it is."""
    seat = Seat.from_arguments()
    store = meet(seat)
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.size, timeout=PATIENCE)
    mesh = init_device_mesh("cpu", (seat.size,), mesh_dim_names=("tensor",))

    def make(wanted: dict[str, Any]) -> Operation:
        job = task(wanted["model"], wanted["batch"], rank=0)  # all ranks see the same samples
        divide(job.model, mesh)
        optimizer = torch.optim.SGD(job.model.parameters(), lr=1e-4, momentum=0.9, foreach=foreach)
        return Operation(step_of(job, job.model, optimizer), dist.barrier)

    serve(seat, make, leave=dist.destroy_process_group)


def all_reduce_of(
    tensor: Tensor, rank: int, size: int, reduce: Callable[[Tensor], object], barrier: Callable[[], object]
) -> Operation:
    """Sum a tensor over all ranks. It holds zeros while it is timed, so that sums of sums do not overflow."""

    def check() -> None:
        # Small whole numbers, different at every place: a sum that is right is exactly right.
        pattern = torch.arange(tensor.numel(), dtype=torch.float32).remainder_(251.0)
        tensor.copy_(pattern).add_(float(rank))
        reduce(tensor)
        pattern.mul_(size).add_(size * (size - 1) / 2)
        if not torch.equal(tensor, pattern):
            wrong = int((tensor != pattern).sum())
            raise AssertionError(f"rank {rank}: {wrong} of {tensor.numel()} sums are wrong")
        tensor.zero_()

    return Operation(run=lambda: reduce(tensor), prepare=barrier, check=check)
