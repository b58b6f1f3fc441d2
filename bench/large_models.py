"""Models in parts, measured: memory, steps, idle time, checkpoints; with torch's FSDP2, DCP and Gloo. See `--help`.

[Note: what ZeRO takes]
With N workers, parameters of P bytes, gradients of P and Adam's states of 2 P: stage 1 takes 2 P + 2 P / N on each
worker, stage 2 takes P + 3 P / N and stage 3 takes 4 P / N (Rajbhandari et al., 2020). Measured is the most that a
worker's process has had above what it had before the model, in steps with next to no activations: whatever is gathered,
copied or kept by the allocator counts.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from crew import Contender, Crew, CrewFailed, Place
from harness import Claim, Report, Row, Value, claim, in_time, ratio, spread, versus
from rounds import Entry, Plan, in_a_line, measure
from suite import Part, main

from argosy.parallel.memory import memory_variables

OURS, FSDP, GLOO, DCP = "Argosy", "FSDP2 on Gloo", "our code on Gloo", "torch DCP"
TENSOR = "torch's parallelize_module on Gloo"
FORMULAS = {1: lambda n: 2 + 2 / n, 2: lambda n: 1 + 3 / n, 3: lambda n: 4 / n}
# What is trained, by how many workers, by us and by whom; the claim is against the first. Computing takes the same time
# on all sides: the larger the batch or the matrices, the less of a step is anything else.
SHARDED = {
    "Stage 3 of an MLP of 25 M parameters, 4 workers, batch 16": ("mlp", 16, 4, "shard_stage=3", (FSDP,)),
    "Stage 3 of a GPT of 10 M parameters, 4 workers, batch 1": ("gpt", 1, 4, "shard_stage=3", (FSDP,)),
    "Stage 3 of a GPT of 10 M parameters, 4 workers, batch 4": ("gpt", 4, 4, "shard_stage=3", (FSDP,)),
}
DIVIDED = {
    "Tensor parallel 2 of a GPT of 10 M parameters, batch 1": ("narrow gpt", 1, 2, "tensor=2", (TENSOR, GLOO)),
    "Tensor parallel 2 of a GPT of 10 M parameters, batch 4": ("narrow gpt", 4, 2, "tensor=2", (TENSOR, GLOO)),
    "Tensor parallel 2 of a GPT of 25 M parameters, batch 1": ("wide gpt", 1, 2, "tensor=2", (TENSOR, GLOO)),
    "Tensor parallel 2 of a GPT of 25 M parameters, batch 8": ("wide gpt", 8, 2, "tensor=2", (TENSOR, GLOO)),
}
SCRIPTS = {FSDP: "train_fsdp.py", TENSOR: "train_tensor_torch.py", GLOO: "train_tensor_gloo.py"}
SAVED = "A checkpoint of 1 GB on 2 workers"
BILLION = {"layers": 52, "width": 1280}  # 1.02 billion parameters
LAYERS = 64  # of 16 MiB: 1 GiB
PLAN = Plan(launches=2, repeats=5, seconds=1.5, least_iterations=2, warmup=0.5)


def argosy(strategy: str, script: str = "train_argosy.py", name: str = OURS) -> Contender:
    """Us, with a strategy."""
    runs = tempfile.mkdtemp(prefix="argosy-bench-")
    environment = {"ARGOSY_SECRET": secrets.token_hex(32), "BENCH_RUNS": runs, "BENCH_STRATEGY": strategy}
    return Contender(name, script, environment=environment | memory_variables(os.environ))


def peer(name: str, script: str) -> Contender:
    """torch's own, on Gloo."""
    return Contender(name, script, environment={"GLOO_SOCKET_IFNAME": "lo"})


def asked(report: Report, strategy: str, workers: int, wanted: dict[str, Any], iterations: int) -> list[dict[str, Any]]:
    """The answers of all workers; none, with a note, if they failed."""
    try:
        with Crew(argosy(strategy, "large_argosy.py"), [Place()] * workers) as crew:
            return crew.ask(wanted, 1, iterations, deadline_seconds=600)
    except CrewFailed as error:
        print(f"  {error}", flush=True)
        report.notes.append(in_a_line(str(error)))
        return []


def memory(report: Report, plan: Plan, quick: bool) -> None:
    """The three stages on 4 workers."""
    for stage in FORMULAS:
        print(f"memory of stage {stage}", flush=True)
        answers = asked(report, f"shard_stage={stage}", 4, {"way": "memory"}, 1 if quick else 4)
        if answers:
            report.extra[f"memory, stage {stage}"] = [answer["peak"] for answer in answers]
            report.extra["memory, parameters"] = answers[0]["parameters"]


def claims_of_memory(report: Report) -> Iterator[Claim]:
    """Against the formulas: see [Note: what ZeRO takes]."""
    for stage, formula in FORMULAS.items():
        peaks, size = report.extra.get(f"memory, stage {stage}"), report.extra.get("memory, parameters", 0)
        name = f"Stage {stage}, 4 workers: peak of parameters, gradients and Adam states above ZeRO's formula"
        expected = formula(4) * size
        detail = f"{max(peaks) / 1e6:.0f} MB, formula {expected / 1e6:.0f} MB" if peaks else ""
        value = spread([peak / expected - 1 for peak in peaks]) if peaks else None
        yield claim(name, value, 0.15, "%", at_most=True, detail=detail)


def steps_of(trainings: Mapping[str, tuple[str, int, int, str, tuple[str, ...]]], **more: Any) -> Part:
    """Sharded, or divided by layers, on our backend and on Gloo."""

    def run(report: Report, plan: Plan, quick: bool) -> None:
        for title, (model, batch, workers, strategy, names) in trainings.items():
            contenders = argosy(strategy), *(peer(name, SCRIPTS[name]) for name in names)
            entries = [Entry(each.name, each, [1], {"model": model, "batch": batch, **more}) for each in contenders]
            report.add(*measure(title, entries, [Place()] * workers, plan))

    def claims(report: Report) -> Iterator[Claim]:
        for title, (*_, (name, *_)) in trainings.items():
            rows = (report.find(title, who, 1) for who in (name, OURS))
            yield versus(f"{title}: steps per second, against {name}", *rows, 1.5)

    return Part(run, claims)


def bubble(report: Report, plan: Plan, quick: bool) -> None:
    """Two workers, equal stages."""
    for schedule, split in (("1f1b", "blocks.4"), ("zero-bubble", "blocks.2,blocks.4,blocks.6")):
        print(f"the bubble of {schedule}", flush=True)
        strategy = f"pipeline=2 schedule={schedule} split={split} micro_batches=8"
        answers = asked(report, strategy, 2, {"way": "bubble", "batch": 16}, 3 if quick else 30)
        if answers:
            report.extra[f"bubble, {schedule}"] = {key: answers[0][key] for key in ("idle", "theory")}


def claims_of_bubble(report: Report) -> Iterator[Claim]:
    """Points of the workers' time."""
    for schedule in ("1f1b", "zero-bubble"):
        told = report.extra.get(f"bubble, {schedule}")
        value = Value(abs(told["idle"] - told["theory"])) if told else None
        detail = f"idle {told['idle']:.1%}, by theory {told['theory']:.1%}" if told else ""
        name = f"Pipeline of 2 workers, {schedule}: idle time measured, off the schedule's own"
        yield claim(name, value, 0.10, "%", at_most=True, detail=detail)


def checkpoints(report: Report, plan: Plan, quick: bool) -> None:
    """Saved and loaded by turns, on one disk."""
    layers = 4 if quick else LAYERS
    folder = Path(tempfile.mkdtemp(prefix="argosy-bench-", dir=os.environ.get("BENCH_DISK")))
    ours, theirs = argosy("shard_stage=3", "large_argosy.py"), peer(DCP, "checkpoint_dcp.py")
    try:
        for what in ("save", "load", "stall"):
            wanted = {"way": "checkpoint", "what": what, "layers": layers}
            entries = [Entry(OURS, ours, [1], {**wanted, "folder": str(folder / "ours")})]
            entries += [Entry(DCP, theirs, [1], {**wanted, "folder": str(folder / "dcp")})] if what != "stall" else []
            # Of each turn one save is timed, into a folder that is empty. One before it would be in its way: a save in
            # the background waits for it, and one that replaces it is slower (we keep the old one until the new one is
            # whole) or faster (DCP empties the files first, and gets their memory for the new ones).
            warmup = plan.warmup if what == "load" else 0
            once = replace(plan, launches=1, seconds=0, least_iterations=1, most_iterations=1, warmup=warmup)
            once = replace(once, repeats=3 * plan.repeats)  # of one each
            report.add(*measure(f"{SAVED}: {what}", entries, [Place()] * 2, once))
    finally:
        shutil.rmtree(folder)


def claims_of_checkpoints(report: Report) -> Iterator[Claim]:
    """Save and load together, and what a save in the background holds up."""
    rows = {(what, who): report.find(f"{SAVED}: {what}", who, 1) for what in ("save", "load") for who in (OURS, DCP)}
    both = {who: _sum(rows["save", who], rows["load", who]) for who in (OURS, DCP)}
    yield versus(f"{SAVED}: save and load, against {DCP}", both[DCP], both[OURS], 1.0)
    stall, whole = report.find(f"{SAVED}: stall", OURS, 1), rows["save", OURS]
    part = ratio(stall, whole) if stall and whole else None
    detail = f"{in_time(stall.seconds)} of {in_time(whole.seconds)}" if stall and whole else ""
    yield claim(f"{SAVED}: a step held up by a save in the background, of the save", part, 0.10, "%", True, detail)


def _sum(one: Row | None, other: Row | None) -> Row | None:
    if one is None or other is None:
        return None
    repeats = tuple(a + b for a, b in zip(one.repeats, other.repeats, strict=False))
    return replace(one, repeats=repeats)


def on_meta(report: Report, plan: Plan, quick: bool) -> None:
    """A billion parameters on 4 workers."""
    print("a model on the meta device", flush=True)
    size = {"layers": 4, "width": 384} if quick else BILLION
    answers = asked(report, "shard_stage=3", 4, {"way": "meta", **size}, 1)
    if answers:
        peaks = [answer["peak"] for answer in answers]
        report.extra["meta"] = {"peaks": peaks, "parameters": answers[0]["parameters"]}


def claims_of_meta(report: Report) -> Iterator[Claim]:
    """Each of four workers holds a quarter in the end; half would do to say that none has held the whole."""
    told = report.extra.get("meta")
    value = spread([peak / told["parameters"] for peak in told["peaks"]]) if told else None
    detail = f"{max(told['peaks']) / 1e6:.0f} of {told['parameters'] / 1e6:.0f} MB" if told else ""
    yield claim("1 B parameters set up on 4 workers: the most that one held, of all", value, 0.5, "%", True, detail)


PARTS = {
    "memory": Part(memory, claims_of_memory),
    "sharded": steps_of(SHARDED),
    "tensor": steps_of(DIVIDED, same=True),
    "bubble": Part(bubble, claims_of_bubble),
    "checkpoints": Part(checkpoints, claims_of_checkpoints),
    "meta": Part(on_meta, claims_of_meta),
}

if __name__ == "__main__":
    main("Large models", PARTS, PLAN, Plan(launches=1, repeats=2, seconds=0.5))
