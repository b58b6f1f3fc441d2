"""Gradient compression on slow networks, measured: us with each codec, and torch's DDP, in one run. See `--help`.

Two hosts (network namespaces) with one worker each train an MLP of 25 million parameters, over 1 Gbit/s and over
100 Mbit/s. DGC is measured after its warm-up. The bytes are those that the codec hands over for each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import network
from crew import Crew
from data_parallel import DDP, PLAN, argosy, ddp
from harness import Claim, Report, Value, claim, versus
from rounds import Entry, Plan, measure
from suite import Part, main

GIGABIT, SLOW = "2 hosts, 1 Gbit/s", "2 hosts, 100 Mbit/s"
SIZE = 96 << 20
DENSE_BYTES = 4 * 25_189_386  # all gradients of the model
DENSE = "Argosy, dense"
CODECS = {
    "bf16": "compress=bf16",
    "int8": "compress=int8",
    "int4": "compress=int4",
    "sign": "compress=sign",
    "topk": "compress=topk:0.01",
    "powersgd": "compress=powersgd:4",
    "dgc": "compress=dgc dgc_warmup_epochs=0",
}
TARGETS = {"dgc": 8.0, "powersgd": 6.0, "int8": 2.5}


def label(codec: str) -> str:
    """The codec's line in the table."""
    return f"Argosy, {codec}"


def over(setting: str, mbits: float, codecs: list[str]) -> Part:
    """Train over links of a speed."""

    def run(report: Report, plan: Plan, quick: bool) -> None:
        operation = {"model": "mlp", "batch": 16}
        chosen = ["dgc"] if quick else codecs
        entries = [
            Entry(DDP, ddp(network.DEVICE), [SIZE], operation),
            Entry(DENSE, argosy(DENSE), [SIZE], operation),
            *(Entry(label(codec), argosy(label(codec), CODECS[codec]), [SIZE], operation) for codec in chosen),
        ]
        repeats = plan.repeats if setting == GIGABIT else 3  # of many seconds each
        patient = replace(plan, repeats=repeats, least_iterations=2)
        with network.network(hosts=2, per_host=1, mbits=mbits) as places:
            rows, notes = measure(setting, entries, places, patient)
        report.add(rows, notes)

    return Part(run, claims_of_gigabit if setting == GIGABIT else claims_of_slow, needs_network=True)


def claims_of_gigabit(report: Report) -> Iterator[Claim]:
    """Against DDP with whole gradients, and the bytes of DGC."""
    dense = report.find(GIGABIT, DDP, SIZE)
    for codec, target in TARGETS.items():
        ours = report.find(GIGABIT, label(codec), SIZE)
        yield versus(f"{GIGABIT}, {codec}: steps per second, against DDP", dense, ours, target)


def claims_of_slow(report: Report) -> Iterator[Claim]:
    """The same for DGC alone."""
    dense, ours = report.find(SLOW, DDP, SIZE), report.find(SLOW, label("dgc"), SIZE)
    yield versus(f"{SLOW}, dgc: steps per second, against DDP", dense, ours, 30.0)


def count_bytes(report: Report, plan: Plan, quick: bool) -> None:
    """What each codec hands over in a step of the same training, as its object counts it."""
    steps = 4
    told: dict[str, float] = {}
    with network.network(hosts=2, per_host=1, mbits=1000.0) as places:
        for codec, strategy in CODECS.items():
            with Crew(argosy(label(codec), strategy), places) as crew:
                before, after = (
                    crew.ask({"model": "mlp", "batch": 16}, 1, steps - 1, deadline_seconds=90)[0]["bytes_sent"]
                    for _ in range(2)
                )
            told[codec] = (after - before) / steps
    report.extra["bytes of a step"] = told


def notes_on_bytes(report: Report) -> Iterator[str]:
    """Of all codecs."""
    told = report.extra.get("bytes of a step", {})
    shares = ", ".join(f"{codec} 1/{DENSE_BYTES / count:.4g}" for codec, count in told.items())
    yield f"bytes that a worker hands over in a step, of those of all gradients: {shares}"


def claims_of_bytes(report: Report) -> Iterator[Claim]:
    """After warm-up."""
    told = report.extra.get("bytes of a step", {})
    value = Value(told["dgc"] / DENSE_BYTES) if told else None
    yield claim("dgc, 99.9 %: bytes on the wire, of a dense step's", value, 1 / 250, "%", at_most=True)


PARTS = {
    "bytes": Part(count_bytes, claims_of_bytes, needs_network=True, notes=notes_on_bytes),
    "gigabit": over(GIGABIT, 1000.0, list(CODECS)),
    "slow": over(SLOW, 100.0, ["powersgd", "dgc"]),
}

if __name__ == "__main__":
    main("Gradient compression", PARTS, replace(PLAN, launches=1), Plan(launches=1, repeats=2, seconds=0.5))
