"""The demo: the same script with 1 worker and with 2, side by side. Run it with `make demo`."""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from rich.console import Console
from rich.table import Table

matplotlib.use("agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
FOLDER = Path("runs/demo")


@dataclass
class Run:
    workers: int
    accuracy: float
    losses: list[float]
    samples_per_second: float


def train(workers: int) -> Run:
    """Run the digits script; its events tell the loss of every step and the speed."""
    folder = FOLDER / f"{workers}-workers"
    command = [sys.executable, "-m", "argosy", "run", "--workers", str(workers), "--threads", "1"]
    # batch=global: the workers divide the script's batch, so both runs compute the same steps.
    command += ["--strategy", "batch=global", "--run-folder", str(folder), str(HERE / "digits.py"), *sys.argv[1:]]
    subprocess.run(command, check=True)
    events = [json.loads(line) for line in (folder / "rank0.events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    seconds = steps[-1]["time"] - steps[0]["time"]
    samples = sum(step["samples"] for step in steps[1:])
    result = json.loads((folder / "result.json").read_text())
    return Run(workers, result["accuracy"], [step["loss"] for step in steps], samples / seconds)


def show(one: Run, two: Run) -> None:
    difference = max(abs(a - b) for a, b in zip(one.losses, two.losses, strict=True))
    table = Table(title="The same training, on 1 worker and on 2 (one thread each)")
    for column in ("workers", "test accuracy", "last loss", "largest loss difference", "samples/s", "speed-up"):
        table.add_column(column, justify="right")
    for run in (one, two):
        table.add_row(
            str(run.workers),
            f"{run.accuracy:.2%}",
            f"{run.losses[-1]:.5f}",
            "-" if run is one else f"{difference:.1e}",
            f"{run.samples_per_second:,.0f}",
            f"{run.samples_per_second / one.samples_per_second:.2f} x",
        )
    Console().print(table)


def draw(one: Run, two: Run) -> Path:
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(one.losses, linewidth=5, color="#9ecae1", label="1 worker")
    axes.plot(two.losses, linewidth=1.2, color="#08306b", label="2 workers")
    axes.set(xlabel="step", ylabel="training loss", yscale="log", title="Two loss curves, one line")
    axes.legend()
    figure.tight_layout()
    picture = FOLDER / "loss.png"
    figure.savefig(picture, dpi=150)
    return picture


def main() -> None:
    began = time.monotonic()
    shutil.rmtree(FOLDER, ignore_errors=True)
    runs = []
    for workers in (1, 2):
        print(f"\n--- {workers} worker{'s' if workers > 1 else ''} ---", flush=True)
        runs.append(train(workers))
    print()
    show(*runs)
    print(f"The loss curves are in {draw(*runs)}. All of it took {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()
