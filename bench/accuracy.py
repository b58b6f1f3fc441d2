"""What lossy options cost in accuracy, measured: the same net, epochs and seeds under each of them. See `--help`.

A ResNet of 20 layers learns a subset of CIFAR-10 (an .npz with train_x, train_y, test_x and test_y, where BENCH_CIFAR
says) or, without it, the digits that come with scikit-learn. Two workers; part `lossy` takes an hour on two cores, and
`large-batch` about as long; the others have one seed and no claim, and take a quarter of that. The exact run is
synchronous training in fp32, with batches of 128.
Between workers of one host sparse codecs would send all, which is cheaper there and loses nothing: here they do not.

Of 2,000 test images a net gets one point more or less right by chance: three seeds can just tell a loss of one point.

Large batches make few steps, eight times fewer: they are compared after more epochs than the rest. They are added up
from eight batches of 128, so that batch normalisation sees as many samples at a time as in the small run.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness import Claim, Report, Value, claim
from rounds import Plan
from suite import Part, main

SCRIPT = Path(__file__).parent / "accuracy_train.py"
DEADLINE_SECONDS = 1800
EXACT = "exact"
EPOCHS, MANY_EPOCHS = 24, 50
SEEDS = 3
ADAMW = {"optimizer": "adamw", "lr": "0.002"}


@dataclass(frozen=True)
class Run:
    """A way to train, and how much of the exact run's accuracy we say that it keeps, in points."""

    name: str
    strategy: str = ""
    options: dict[str, str] = field(default_factory=dict)
    within: float | None = 1.0


RUNS = (
    Run(EXACT, within=None),
    Run("compress=bf16", "compress=bf16"),
    Run("compress=fp16", "compress=fp16", within=None),
    Run("compress=int8", "compress=int8"),
    Run("compress=int4", "compress=int4", within=None),
    Run("compress=sign", "compress=sign", within=None),
    Run("compress=topk:0.01", "compress=topk:0.01", {"exchange": "sparse"}, within=None),
    Run("compress=powersgd:4", "compress=powersgd:4"),
    Run("compress=dgc dgc_warmup_epochs=2", "compress=dgc dgc_warmup_epochs=2", {"exchange": "sparse"}),
    Run("precision=bf16", "precision=bf16"),
    Run("precision=fp16", "precision=fp16", within=None),
    Run("sync=local:2", "sync=local:2"),
    Run("sync=local:4", "sync=local:4"),
    Run("sync=adaptive:8", "sync=adaptive:8", within=None),
    Run("AdamW", options=ADAMW, within=None),
    Run("AdamW, sync=diloco:16:int4", "sync=diloco:16:int4", ADAMW, within=None),
)
BATCH = 1024
SMALL = "SGD, batch 128"
LARS, LINEAR = f"LARS, batch {BATCH}, warm-up", f"SGD, batch {BATCH}, linear rule, warm-up"
LINEAR_RULE = "accumulate=8 lr_scale=linear warmup=2epochs"
CONSTANT = {"schedule": "constant", "lr": "0.02"}
RECIPES = (
    Run(f"SGD, {LINEAR_RULE}", LINEAR_RULE, within=None),
    Run(f"SGD, {LINEAR_RULE} ramp=4:6epochs", f"{LINEAR_RULE} ramp=4:6epochs", within=None),
    Run("AdamW, accumulate=8 lr_scale=sqrt warmup=2epochs", "accumulate=8 lr_scale=sqrt warmup=2epochs", ADAMW, None),
    Run("LAMB, accumulate=8 warmup=2epochs", "accumulate=8 warmup=2epochs", {"optimizer": "lamb", "lr": "0.02"}, None),
    Run("SGD, a constant rate", options=CONSTANT, within=None),
    Run("SGD, a constant rate, average=ema:0.99", "average=ema:0.99", CONSTANT, within=None),
)
LARGE = (
    Run(SMALL, within=None),
    Run(LARS, "accumulate=8 warmup=2epochs", {"optimizer": "lars", "lr": "3.0"}, within=2.0),
    Run(LINEAR, "accumulate=8 warmup=2epochs", {"lr": "0.8"}, within=None),
)


def train(run: Run, seed: int, epochs: int) -> float | None:
    """The test accuracy of one run, in points."""
    with tempfile.TemporaryDirectory(prefix="argosy-bench-") as folder:
        told = Path(folder) / "told.json"
        words = [sys.executable, "-m", "argosy", "run", "--workers", "2"]
        strategy = f"batch=global seed={seed} {run.strategy}".strip()
        options = [word for name, value in run.options.items() for word in (f"--{name}", value)]
        options += ["--seed", str(seed), "--epochs", str(epochs)]
        command = [*words, "--strategy", strategy, str(SCRIPT), str(told), *options]
        done = subprocess.run(
            command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
        )
        if done.returncode != 0:
            print(f"  {run.name} failed: {done.stderr.strip().splitlines()[-1:]}", flush=True)
            return None
        return float(json.loads(told.read_text())["accuracy"])


def table(runs: Sequence[Run], epochs: int = EPOCHS, exact: str = EXACT, seeds: int = SEEDS) -> Part:
    """Runs whose accuracies are compared with an exact one's."""

    def measure(report: Report, plan: Plan, quick: bool) -> None:
        for seed in range(1 if quick else seeds):
            for run in runs:
                points = train(run, seed, 1 if quick else epochs)
                print(f"{run.name}, seed {seed}: {points}", flush=True)
                report.extra[key(run.name, seed)] = points

    def claims(report: Report) -> Iterator[Claim]:
        for run in runs:
            if run.within is not None:
                loss = behind(report, exact, run.name)
                yield claim(f"{run.name}: points of accuracy lost", loss, run.within, "", at_most=True)
        if any(run.name == LARS for run in runs):
            yield claim(f"{LARS}: points better than {LINEAR}", behind(report, LARS, LINEAR), 0.0, "")

    def notes(report: Report) -> Iterator[str]:
        for run in runs:
            known = accuracies(report, run.name)
            if known:
                each = ", ".join(f"{points:.2f}" for points in known.values())
                yield f"{run.name}, {epochs} epochs: {statistics.mean(known.values()):.2f} % ({each})"

    return Part(measure, claims, notes=notes)


def key(name: str, seed: int) -> str:
    """Where the report keeps the accuracy of a run."""
    return f"accuracy, {name}, seed {seed}"


def accuracies(report: Report, name: str) -> dict[int, float]:
    """What is known of a way to train, by seed."""
    known = {seed: report.extra.get(key(name, seed)) for seed in range(SEEDS)}
    return {seed: points for seed, points in known.items() if points is not None}


def behind(report: Report, better: str, other: str) -> Value | None:
    """By how many points one way is behind another, on average over the seeds."""
    ones, others = accuracies(report, better), accuracies(report, other)
    pairs = [ones[seed] - others[seed] for seed in ones if seed in others]
    return Value(statistics.mean(pairs), min(pairs), max(pairs)) if pairs else None


CLAIMED = [run for run in RUNS if run.name == EXACT or run.within is not None]
PARTS = {
    "lossy": table(CLAIMED),
    "others": table([run for run in RUNS if run not in CLAIMED], seeds=1),
    "recipes": table(RECIPES, seeds=1),
    "large-batch": table(LARGE, epochs=MANY_EPOCHS, exact=SMALL),
}

if __name__ == "__main__":
    told = "Means over the seeds; in brackets the least and the largest difference of a seed."
    main("Accuracy", PARTS, Plan(), Plan(), any_machine=True, figures=told)
