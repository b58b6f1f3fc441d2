"""Our plan of tensor parallelism, on torch's Gloo backend instead of ours."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from models import step_of, task
from serving import Operation, Seat, serve
from torch.distributed.device_mesh import init_device_mesh
from torch_tensors import PATIENCE, meet

from argosy.parallel.tensor.apply import tensor_parallel
from argosy.parallel.tensor.config import TensorConfig


def main() -> None:
    seat = Seat.from_arguments()
    store = meet(seat)
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.size, timeout=PATIENCE)
    mesh = init_device_mesh("cpu", (seat.size,), mesh_dim_names=("tensor",))

    def make(wanted: dict[str, Any]) -> Operation:
        job = task(wanted["model"], wanted["batch"], rank=0)  # all ranks see the same samples
        tensor_parallel(job.model, mesh, TensorConfig())
        optimizer = torch.optim.SGD(job.model.parameters(), lr=1e-4, momentum=0.9, foreach=True)
        return Operation(step_of(job, job.model, optimizer), dist.barrier)

    serve(seat, make, leave=dist.destroy_process_group)


main()
