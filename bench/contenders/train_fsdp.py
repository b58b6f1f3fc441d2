"""Training by torch's FSDP2 on Gloo, as its tutorial has it: each block, then the root. Steps are torch's foreach."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from models import step_of, task
from serving import Operation, Seat, serve
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_tensors import PATIENCE, meet


def main() -> None:
    seat = Seat.from_arguments()
    store = meet(seat)
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.size, timeout=PATIENCE)
    mesh = init_device_mesh("cpu", (seat.size,))

    def make(wanted: dict[str, Any]) -> Operation:
        job = task(wanted["model"], wanted["batch"], seat.rank)
        model: Any = job.model
        for block in getattr(model, "blocks", [layer for layer in model.children() if list(layer.parameters())]):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, foreach=True)
        return Operation(step_of(job, model, optimizer), dist.barrier)

    serve(seat, make, leave=dist.destroy_process_group)


main()
