"""Training by torch's DistributedDataParallel on Gloo, as its tutorial has it, gradients as views of its buckets."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from models import step_of, task
from serving import Operation, Seat, serve
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    seat = Seat.from_arguments()
    torch.set_num_threads(1)
    where, port = seat.store.rsplit(":", 1)
    patience = timedelta(seconds=60)
    store = dist.TCPStore(where, int(port), seat.size, is_master=seat.rank == 0, timeout=patience)
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.size, timeout=patience)

    def make(wanted: dict[str, Any]) -> Operation:
        job = task(wanted["model"], wanted["batch"], seat.rank)
        model = DistributedDataParallel(job.model, gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
        return Operation(step_of(job, model, optimizer), dist.barrier)

    serve(seat, make, leave=dist.destroy_process_group)


main()
