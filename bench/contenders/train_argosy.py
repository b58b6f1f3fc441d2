"""Training by Argosy as a user has it: `argosy.init` and `distribute`. The strategy comes with the environment."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch
from models import gpt, lesson_of, step_of, task
from serving import Operation, Seat, serve

import argosy
from argosy.parallel.reducer import Reducer

LAST = 20  # losses that are averaged


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

    def learn(wanted: dict[str, Any]) -> Operation:
        torch.manual_seed(0)
        net = gpt()
        model, optimizer = fleet.distribute(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
        losses: list[float] = []
        step = lesson_of(wanted["batch"], seat.rank, model, optimizer, losses)
        return Operation(step, fleet.group.barrier, tell=lambda: {"loss": statistics.mean(losses[-LAST:])})

    def watch(wanted: dict[str, Any]) -> Operation:
        """Tells how long sums take when the last worker has done its backward pass, of a step's seconds."""
        job = task(wanted["model"], wanted["batch"], seat.rank)
        optimizer = torch.optim.SGD(job.model.parameters(), lr=1e-4, momentum=0.9)
        step = step_of(job, *fleet.distribute(job.model, optimizer))
        times: list[list[float]] = []  # of each step: its end, when sums were awaited and when they were there
        finish = Reducer.finish

        def watched(reducer: Reducer, weight: float | None) -> set[torch.nn.Parameter]:
            times.append([time.monotonic()])
            used = finish(reducer, weight)
            times[-1].append(time.monotonic())
            return used

        def run() -> None:
            busy = time.process_time() - time.thread_time()
            step()
            times[-1] += [time.monotonic(), time.process_time() - time.thread_time() - busy]

        def tell() -> dict[str, float]:
            everybody = torch.stack(fleet.group.all_gather(torch.tensor(times, dtype=torch.float64)))
            times.clear()
            awaited, there, ended, busy = everybody.unbind(-1)
            exposed, late = there.amax(0) - awaited.amax(0), awaited.amax(0) - awaited.amin(0)
            seconds = ended.amax(0).diff()
            found = {"exposed": exposed, "late": late, "threads": busy.mean(0), "step": seconds}
            return {name: float(value.mean()) for name, value in found.items()}

        Reducer.finish = watched  # type: ignore[method-assign]
        return Operation(run, fleet.group.barrier, tell=tell)

    def make(wanted: dict[str, Any]) -> Operation:
        if wanted.get("learn"):
            return learn(wanted)
        if wanted.get("watch"):
            return watch(wanted)
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
