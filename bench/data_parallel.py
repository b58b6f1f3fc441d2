"""Synchronous data parallelism, measured: us and torch's DDP on Gloo, in one run, as ratios. See `--help`.

Two workers of one thread each, as users of DDP on CPUs have it. What communication costs is told by two workers that
train the same and do not talk, and what a second worker is worth by one that trains alone.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

from crew import Contender, Place
from harness import Claim, Report, Value, claim, ratio, spread, versus
from rounds import Entry, Plan, measure
from suite import Part, main

from argosy.parallel.memory import memory_variables

OURS, DDP, SILENT, ALONE = "Argosy", "DDP on Gloo", "two workers that do not talk", "one worker"


@dataclass(frozen=True)
class Subject:
    """A model that is trained, and what we claim of it."""

    name: str
    title: str
    batch: int
    megabytes: int
    against_ddp: float
    exposed: float | None = None
    speedup: float | None = None

    @property
    def size(self) -> int:
        """Bytes of parameters, about: the column of the table."""
        return self.megabytes << 20


SUBJECTS = (
    Subject("mlp", "MLP of 25 M parameters, batch 16", 16, 96, against_ddp=1.5),
    Subject("resnet18", "ResNet-18, batch 16", 16, 43, against_ddp=1.0, exposed=0.05, speedup=1.9),
    Subject("gpt", "GPT of 10 M parameters, batch 8", 8, 41, against_ddp=1.0, exposed=0.05),
)


def argosy(name: str = OURS, strategy: str = "") -> Contender:
    """Us, with a strategy."""
    runs = tempfile.mkdtemp(prefix="argosy-bench-")
    environment = {"ARGOSY_SECRET": secrets.token_hex(32), "BENCH_RUNS": runs, "BENCH_STRATEGY": strategy}
    environment |= memory_variables(os.environ)  # as `argosy run` sets it
    return Contender(name, "train_argosy.py", environment=environment)


def ddp(interface: str = "lo") -> Contender:
    """torch's own."""
    return Contender(DDP, "train_ddp.py", environment={"GLOO_SOCKET_IFNAME": interface})


def steps(report: Report, plan: Plan, quick: bool) -> None:
    """Every model in every way."""
    for subject in SUBJECTS[:1] if quick else SUBJECTS:
        sizes, operation = [subject.size], {"model": subject.name, "batch": subject.batch}
        ours = argosy()
        entries = [
            Entry(OURS, ours, sizes, operation),
            Entry(DDP, ddp(), sizes, operation),
            Entry(SILENT, ours, sizes, {**operation, "alone": True}, together=True),
            Entry(ALONE, argosy("argosy, one worker"), sizes, operation, places=slice(0, 1)),
        ]
        rows, notes = measure(subject.title, entries, [Place()] * 2, plan)
        report.add(rows, notes)


def claims_of_steps(report: Report) -> Iterator[Claim]:
    """Against DDP, against silence, and against one worker."""
    for subject in SUBJECTS:
        ours, peer, silent, alone = (
            report.find(subject.title, name, subject.size) for name in (OURS, DDP, SILENT, ALONE)
        )
        yield versus(f"{subject.title}: steps per second, against {DDP}", peer, ours, subject.against_ddp)
        if subject.exposed is not None:
            name = f"{subject.title}: communication that computing does not hide, of the step"
            pairs = zip(silent.repeats, ours.repeats, strict=False) if silent and ours else ()
            parts = [1 - quiet / talking for quiet, talking in pairs]
            yield claim(name, spread(parts) if parts else None, subject.exposed, "%", at_most=True)
        if subject.speedup is not None:
            name = f"{subject.title}: samples per second of 2 workers, against 1"
            twice = ratio(alone, ours) if alone and ours else None
            value = Value(*(2 * (part or 0) for part in (twice.value, twice.p10, twice.p90))) if twice else None
            yield claim(name, value, subject.speedup)


PARTS = {"steps": Part(steps, claims_of_steps)}

if __name__ == "__main__":
    main("Data parallelism", PARTS, Plan(seconds=3.0), Plan(launches=1, repeats=2, seconds=0.5))
