"""Training by Argosy as a user has it: `argosy.init` and `distribute`. The strategy comes with the environment."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from models import gpt, lesson_of, optimizer_of, step_of, task
from seating import join
from serving import Operation, Seat, serve

import argosy
from argosy.parallel.reducer import Reducer

LAST = 20  # losses that are averaged

Wanted = dict[str, Any]


def steps_of(wanted: Wanted, fleet: argosy.Fleet) -> Callable[[], None]:
    """Steps of a model on one batch; together with the other workers unless it is `alone`, or only `in_step`.

    All workers have the `same` batch if they compute every sample together.
    """
    job = task(wanted["model"], wanted["batch"], 0 if wanted.get("same") else fleet.rank)
    model, name = job.model, wanted.get("optimizer", "sgd")
    optimizer = optimizer_of(model, name, True if wanted.get("alone") else None)
    if not wanted.get("alone"):
        model, optimizer = fleet.distribute(model, optimizer)
    step = step_of(job, model, optimizer)
    if not wanted.get("in_step"):
        return step

    def step_and_wait() -> None:
        step()
        fleet.group.barrier()

    return step_and_wait


def train(wanted: Wanted, fleet: argosy.Fleet) -> Operation:
    """Tells what its codec has sent so far."""
    step = steps_of(wanted, fleet)
    return Operation(step, fleet.group.barrier, tell=lambda: {"bytes_sent": fleet._training.bytes_sent})


def learn(wanted: Wanted, fleet: argosy.Fleet) -> Operation:
    """A GPT learns a text; tells its last losses' mean."""
    torch.manual_seed(0)
    net = gpt()
    model, optimizer = fleet.distribute(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
    losses: list[float] = []
    step = lesson_of(wanted["batch"], fleet.rank, model, optimizer, losses)
    return Operation(step, fleet.group.barrier, tell=lambda: {"loss": statistics.mean(losses[-LAST:])})


def watch(wanted: Wanted, fleet: argosy.Fleet) -> Operation:
    """Tells, in seconds and on average: how long sums took when the last worker had done its backward pass, how far
    apart the workers were there, what other threads than the script's have computed, and the step.
    """
    step = steps_of(wanted, fleet)
    finish = Reducer.finish
    times: list[list[float]] = []  # of each step: when sums were awaited, when they were there, its end, other threads

    def watched(reducer: Reducer, weight: float | None) -> list[bool]:
        times.append([time.monotonic()])
        used = finish(reducer, weight)
        times[-1].append(time.monotonic())
        return used

    def run() -> None:
        others = time.process_time() - time.thread_time()
        step()
        times[-1] += [time.monotonic(), time.process_time() - time.thread_time() - others]

    def tell() -> dict[str, float]:
        everybodys = torch.stack(fleet.group.all_gather(torch.tensor(times, dtype=torch.float64)))
        times.clear()
        awaited, there, ended, others = everybodys.unbind(-1)
        found = {
            "exposed": there.amax(0) - awaited.amax(0),
            "late": awaited.amax(0) - awaited.amin(0),
            "threads": others.mean(0),
            "step": ended.amax(0).diff(),
        }
        return {name: float(value.mean()) for name, value in found.items()}

    Reducer.finish = watched  # type: ignore[method-assign]
    return Operation(run, fleet.group.barrier, tell=tell)


def main() -> None:
    seat = Seat.from_arguments()
    fleet = join(seat)
    ways = {"train": train, "learn": learn, "watch": watch}
    serve(seat, lambda wanted: ways[wanted.get("way", "train")](wanted, fleet), fleet.close)


main()
