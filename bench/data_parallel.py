"""Synchronous data parallelism, measured: us and torch's DDP on Gloo, in one run, as ratios. See `--help`.

Two workers of one thread each, as users of DDP on CPUs have it. What synchronous training costs is told by two workers
that train the same and do not talk, and what a second worker is worth by one that trains alone. Two that do not talk
but wait for each other after every step show what a step would take if communication were free: the longer a step, the
less they wait, so what a second worker is worth is asked at a larger batch too. Argosy fuses an
optimizer's steps, and whoever trains without it here does so by hand. DDP is claimed against as its tutorial has it,
and measured with a fused optimizer too.

[Note: exposed]
A step that waits for all workers takes as long as the slowest of them, whatever communication costs; on a machine whose
cores are not equally fast from one second to the next that is much. So communication is measured by itself: from when
the last worker has done its backward pass until the last sum is there, and what the engine's threads compute meanwhile.
"""

from __future__ import annotations

import os
import secrets
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from crew import Contender, Crew, Place
from harness import Claim, Report, Row, Value, claim, in_time, ratio, spread, versus
from rounds import Entry, Plan, measure
from suite import Part, main
from tiles import TOLD, tiles_told

from argosy.parallel.memory import memory_variables

OURS, DDP, SILENT, ALONE = "Argosy", "DDP on Gloo", "two workers that do not talk", "one worker"
DDP_FUSED = "DDP on Gloo, with a fused optimizer"
ADAMW = "MLP of 25 M parameters, batch 16, AdamW"
IN_STEP = "two that only wait for each other"
PRECISION, FULL, SHORT = "bf16 against fp32, GPT of 10 M parameters", "Argosy, fp32", "Argosy, bf16"
LESSONS = 100
STRAGGLER, EQUAL, BALANCED = "One of two workers 3 times slower, 60 steps", "equal shares", "balance=true"
# Short turns, and many of them: the machine's speed changes from one second to the next, and that is to hit all alike.
# The first steps after a rest are a tenth slower: training has no rests, so some precede those that count.
PLAN = Plan(launches=2, repeats=8, seconds=1.5, least_iterations=2, warmup=0.5)


@dataclass(frozen=True)
class Subject:
    """A model that is trained, and what we claim of it."""

    name: str
    title: str
    batch: int
    size: int  # bytes of parameters, about: the column of the table
    against_ddp: float | None = None
    exposed: float | None = None
    speedup: float | None = None


SUBJECTS = (
    Subject("tiny", "20 layers of 110 parameters, batch 16: what a step costs anyway", 16, 8 << 10, against_ddp=1.0),
    Subject("mlp", "MLP of 25 M parameters, batch 16", 16, 96 << 20, against_ddp=1.5),
    Subject("resnet18", "ResNet-18, batch 16", 16, 43 << 20, against_ddp=1.0, exposed=0.05, speedup=1.9),
    Subject("resnet18", "ResNet-18, batch 64", 64, 43 << 20, speedup=1.9),
    Subject("gpt", "GPT of 10 M parameters, batch 16", 16, 41 << 20, against_ddp=1.0, exposed=0.05),
)


def argosy(name: str = OURS, strategy: str = "", **others: str) -> Contender:
    """Us, with a strategy, and other variables of the environment."""
    runs = tempfile.mkdtemp(prefix="argosy-bench-")
    environment = {"ARGOSY_SECRET": secrets.token_hex(32), "BENCH_RUNS": runs, "BENCH_STRATEGY": strategy}
    environment |= memory_variables(os.environ) | others  # the former as `argosy run` sets it
    return Contender(name, "train_argosy.py", environment=environment)


def ddp(interface: str = "lo") -> Contender:
    """torch's own."""
    return Contender(DDP, "train_ddp.py", environment={"GLOO_SOCKET_IFNAME": interface})


def steps(report: Report, plan: Plan, quick: bool) -> None:
    """Every model in every way."""
    for subject in SUBJECTS[:1] if quick else SUBJECTS:
        sizes, operation = [subject.size], {"model": subject.name, "batch": subject.batch}
        ours, peer = argosy(), ddp()
        peers = [Entry(DDP, peer, sizes, operation), Entry(DDP_FUSED, peer, sizes, {**operation, "fused": True})]
        entries = [
            Entry(OURS, ours, sizes, operation),
            *(peers if subject.against_ddp is not None else []),
            Entry(SILENT, ours, sizes, {**operation, "alone": True}, together=True),
            Entry(IN_STEP, ours, sizes, {**operation, "alone": True, "in_step": True}),
            Entry(ALONE, argosy("argosy, one worker"), sizes, operation, places=slice(0, 1)),
        ]
        rows, notes = measure(subject.title, entries, [Place()] * 2, plan)
        report.add(rows, notes)


def claims_of_steps(report: Report) -> Iterator[Claim]:
    """Against DDP, and against one worker."""
    for subject in SUBJECTS:
        names = (OURS, DDP, ALONE, IN_STEP)
        ours, peer, alone, free = (report.find(subject.title, name, subject.size) for name in names)
        if subject.against_ddp is not None:
            yield versus(f"{subject.title}: steps per second, against {DDP}", peer, ours, subject.against_ddp)
        if subject.speedup is not None:
            name = f"{subject.title}: samples per second of 2 workers, against 1"
            detail = f"{IN_STEP}: {2 * ratio(alone, free).value:.3g}x" if alone and free else ""
            yield claim(name, _twice(alone, ours), subject.speedup, detail=detail)


def _twice(slower: Row | None, faster: Row | None) -> Value | None:
    """The ratio of samples, if one of the two takes twice as many at a time."""
    if slower is None or faster is None:
        return None
    found = ratio(slower, faster)
    return Value(*(2 * (part or 0) for part in (found.value, found.p10, found.p90)))


def adamw(report: Report, plan: Plan, quick: bool) -> None:
    """An optimizer whose step takes longer than all the rest, unless it is fused."""
    operation, peer = {"model": "mlp", "batch": 16, "optimizer": "adamw"}, ddp()
    entries = [
        Entry(OURS, argosy(), [SUBJECTS[1].size], operation),
        Entry(DDP, peer, [SUBJECTS[1].size], operation),
        Entry(DDP_FUSED, peer, [SUBJECTS[1].size], {**operation, "fused": True}),
    ]
    rows, notes = measure(ADAMW, entries, [Place()] * 2, replace(plan, launches=1))
    report.add(rows, notes)


def claims_of_adamw(report: Report) -> Iterator[Claim]:
    """Against DDP as its tutorial has it."""
    peer, ours = (report.find(ADAMW, name, SUBJECTS[1].size) for name in (DDP, OURS))
    yield versus(f"{ADAMW}: steps per second, against {DDP}", peer, ours, 1.5)


def exposed(report: Report, plan: Plan, quick: bool) -> None:
    """What communication adds to a step: see [Note: exposed]."""
    for subject in SUBJECTS:
        if subject.exposed is None:
            continue
        with Crew(argosy(), [Place()] * 2) as crew:
            watched = {"model": subject.name, "batch": subject.batch, "way": "watch"}
            turns = [crew.ask(watched, 2, 10, deadline_seconds=300)[0] for _ in range(2 if quick else 5)]
        kept = ("exposed", "late", "threads", "step")
        report.extra[f"exposed, {subject.title}"] = [{name: turn[name] for name in kept} for turn in turns]


def claims_of_exposed(report: Report) -> Iterator[Claim]:
    """The sums that are awaited, and the engine's threads."""
    for subject in SUBJECTS:
        if subject.exposed is None:
            continue
        turns = report.extra.get(f"exposed, {subject.title}", [])
        parts = [(turn["exposed"] + turn["threads"]) / turn["step"] for turn in turns]
        name = f"{subject.title}: communication that computing does not hide, of the step"
        means = {key: statistics.mean(turn[key] for turn in turns) for key in turns[0]} if turns else {}
        detail = ", ".join(f"{key} {in_time(seconds)}" for key, seconds in means.items())
        yield claim(name, spread(parts) if parts else None, subject.exposed, "%", at_most=True, detail=detail)


def precision(report: Report, plan: Plan, quick: bool) -> None:
    """The GPT in fp32 and in bf16: its steps, and what it learns of a text."""
    flags = set(Path("/proc/cpuinfo").read_text(encoding="ascii").split())
    if not flags & {"amx_bf16", "avx512_bf16"}:  # a step takes minutes there
        report.notes.append("precision left out: this CPU has neither AMX nor AVX512-BF16, as the target has it")
        return
    subject = SUBJECTS[-1]
    told = tiles_told()
    crews = {FULL: argosy(FULL, **told), SHORT: argosy(SHORT, "precision=bf16", **told)}
    report.extra["tiles told"] = bool(told)
    operation = {"model": subject.name, "batch": subject.batch}
    entries = [Entry(name, crew, [subject.size], operation) for name, crew in crews.items()]
    rows, notes = measure(PRECISION, entries, [Place()] * 2, plan)
    report.add(rows, notes)
    losses = {}
    for name, crew in crews.items():
        with Crew(crew, [Place()] * 2) as ranks:
            lesson = {"way": "learn", "batch": 8}
            answers = ranks.ask(lesson, 0, 4 if quick else LESSONS, deadline_seconds=900)
            losses[name] = statistics.mean(answer["loss"] for answer in answers)
    report.extra["losses"] = losses
    learnt = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
    report.notes.append(f"the loss of the GPT after {LESSONS} steps on a text: {learnt}")


def claims_of_precision(report: Report) -> Iterator[Claim]:
    """Twice as fast, and as good."""
    full, short = (report.find(PRECISION, name, SUBJECTS[-1].size) for name in (FULL, SHORT))
    faster = versus(f"{PRECISION}: steps per second", full, short, 2.0)
    yield replace(faster, detail=f"{faster.detail}; {TOLD}") if report.extra.get("tiles told") else faster
    losses = report.extra.get("losses")
    off = Value(abs(losses[SHORT] / losses[FULL] - 1)) if losses else None
    yield claim(f"{PRECISION}: difference of the loss after {LESSONS} steps", off, 0.01, "%", at_most=True)


def balance(report: Report, plan: Plan, quick: bool) -> None:
    """A worker that needs three times as long for a sample."""
    crew = Contender("argosy, a slow worker", "slow_worker.py", environment={"ARGOSY_SECRET": secrets.token_hex(32)})
    entries = [Entry(EQUAL, crew, [1], {"balance": False}), Entry(BALANCED, crew, [1], {"balance": True})]
    rows, notes = measure(STRAGGLER, entries, [Place()] * 2, replace(plan, launches=1, least_iterations=1))
    report.add(rows, notes)


def claims_of_balance(report: Report) -> Iterator[Claim]:
    """Of the whole run, with what it takes to find out who is slow."""
    yield versus(
        f"{STRAGGLER}: samples per second", *(report.find(STRAGGLER, way, 1) for way in (EQUAL, BALANCED)), 1.4
    )


PARTS = {
    "steps": Part(steps, claims_of_steps),
    "adamw": Part(adamw, claims_of_adamw),
    "exposed": Part(exposed, claims_of_exposed),
    "precision": Part(precision, claims_of_precision),
    "balance": Part(balance, claims_of_balance),
}

if __name__ == "__main__":
    main("Data parallelism", PARTS, PLAN, Plan(launches=1, repeats=2, seconds=0.5))
