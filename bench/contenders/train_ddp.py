"""Training by torch's DistributedDataParallel on Gloo, as its tutorial has it, gradients as views of its buckets."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from models import optimizer_of, step_of, task
from serving import Operation, Seat, serve
from torch.nn.parallel import DistributedDataParallel
from torch_tensors import PATIENCE, meet


def main() -> None:
    seat = Seat.from_arguments()
    store = meet(seat)
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.size, timeout=PATIENCE)

    def make(wanted: dict[str, Any]) -> Operation:
        job = task(wanted["model"], wanted["batch"], seat.rank)
        model = DistributedDataParallel(job.model, gradient_as_bucket_view=True)
        optimizer = optimizer_of(model, wanted.get("optimizer", "sgd"), wanted.get("fused"))
        return Operation(step_of(job, model, optimizer), dist.barrier)

    serve(seat, make, leave=dist.destroy_process_group)


main()
