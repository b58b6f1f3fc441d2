"""Training by Argosy as a user has it: `argosy.init` and `distribute`. The strategy comes with the environment."""

from __future__ import annotations

import os
from typing import Any

import torch
from models import step_of, task
from serving import Operation, Seat, serve

import argosy


def main() -> None:
    seat = Seat.from_arguments()
    torch.set_num_threads(1)
    where, port = seat.store.rsplit(":", 1)
    # As torchrun says it.
    os.environ |= {"RANK": str(seat.rank), "WORLD_SIZE": str(seat.size), "MASTER_ADDR": where, "MASTER_PORT": port}
    os.environ |= {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "bench"}
    if seat.host_id is not None:
        os.environ["ARGOSY_HOST_ID"] = seat.host_id
    fleet = argosy.init(os.environ.get("BENCH_STRATEGY"), run_folder=os.environ["BENCH_RUNS"])

    def make(wanted: dict[str, Any]) -> Operation:
        job = task(wanted["model"], wanted["batch"], seat.rank)
        optimizer = torch.optim.SGD(job.model.parameters(), lr=1e-4, momentum=0.9)
        if wanted.get("alone"):
            return Operation(step_of(job, job.model, optimizer), fleet.group.barrier)
        model, optimizer = fleet.distribute(job.model, optimizer)

        def tell() -> dict[str, float]:
            return {"bytes_sent": fleet._training.bytes_sent}

        return Operation(step_of(job, model, optimizer), fleet.group.barrier, tell=tell)

    serve(seat, make, fleet.close)


main()
