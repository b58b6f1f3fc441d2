"""Whole jobs of the parameter server: the click model's steps, and training over a slow link. Parts of `ps.py`."""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import network
from crew import THREADS, Contender, Crew, CrewFailed, Place, free_port
from harness import Claim, Report, Row, Value, claim, quantile, ratio
from peers import PeerMissing
from rounds import Plan, in_a_line
from suite import Part

SAMPLES, BATCHES, WORKERS = 4096, 10, 2
SIZE = SAMPLES * 26 * 16 * 4  # bytes of a batch's rows: the column of the table
SCRIPT = Path(__file__).parent / "ps_train.py"
CLICKS = Path(__file__).parents[1] / "examples" / "ctr.py"
STEPS = "Wide & deep, whole steps of 2 workers with 1 server"
OURS = "Argosy, ps=async"
SLOW = "Click log, rows of 256 numbers, a server and a worker on one host and a worker on another, 100 Mbit/s"
WAYS = ("ps=sync", "ps=geo:50")
LEARNT, LEARNERS = "Click log, two epochs, 4 workers and 2 servers", 4
ALONE = ""
MODES = (
    "ps=sync batch=global",
    "ps=sync batch=global aggregate=3",
    "ps=async",
    "ps=async:dc",
    "ps=ssp:2",
    "ps=half-async:4",
    "ps=geo:8",
)
MBITS = 100.0
DEADLINE_SECONDS = 280
Turn = Sequence[float]  # seconds of some runs of `BATCHES` batches on each worker


class JobFailed(Exception):
    """A job ended with an error, or not in time; the text has its last words."""


@contextmanager
def job(words: Sequence[str], script: Sequence[str], places: Sequence[Place], servers: int = 1) -> Iterator[Path]:
    """Run a script with Argosy, on one node for each place, the first with servers; the folder, once it has ended."""
    environment = {**os.environ, **THREADS, "ARGOSY_SECRET": secrets.token_hex(32)}
    coordinator = f"{places[0].address}:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="argosy-bench-") as folder, ExitStack() as stack:
        nodes = []
        for number, place in enumerate(places):
            command = [*place.enter, sys.executable, "-m", "argosy", "run", "--threads", "1", *words]
            command += ["--servers", str(servers if number == 0 else 0)]
            command += ["--run-folder", str(Path(folder) / "run")]
            if len(places) > 1:
                command += ["--nodes", str(len(places)), "--node-rank", str(number), "--coordinator", coordinator]
            # Namespaces of one machine could share memory, which hosts cannot.
            environment["ARGOSY_HOST_ID"] = place.address
            output = stack.enter_context(open(Path(folder) / f"node{number}", "w+"))
            node = subprocess.Popen(
                [
                    *command,
                    *script,
                ],
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=output,
            )
            stack.callback(_end, node)
            nodes.append(node)
        for number, node in enumerate(nodes):
            try:
                failed = node.wait(DEADLINE_SECONDS) != 0
            except subprocess.TimeoutExpired:
                failed = True
            if failed:
                said = (Path(folder) / f"node{number}").read_text()[-2000:]
                raise JobFailed(f"{' '.join(words)}, node {number}\n{said}")
        yield Path(folder) / "run"


def _end(node: subprocess.Popen[bytes]) -> None:
    if node.poll() is None:
        node.terminate()  # the launcher ends its workers
        try:
            node.wait(15)
        except subprocess.TimeoutExpired:
            node.kill()
            node.wait()


def our_turn(popularity: str, steps: int) -> Turn:
    """Seconds in which each of the workers would do ten batches if each had the mean of their speeds."""
    with tempfile.TemporaryDirectory(prefix="argosy-bench-") as told:
        words = ["--workers", str(WORKERS), "--strategy", "ps=async"]
        with job(words, [str(SCRIPT), told, popularity, str(steps)], [Place()]):
            times = [json.loads((Path(told) / f"rank {rank}.json").read_text()) for rank in range(WORKERS)]
    return [1 / statistics.mean(1 / one for one in ones) for ones in zip(*times, strict=False)]


def steps_with(make: Callable[[], Contender], name: str) -> Part:
    """Our jobs and the peer's turns, one after the other."""

    def run(report: Report, plan: Plan, quick: bool) -> None:
        turns: dict[str, list[Turn]] = {OURS: [], name: []}
        try:
            peer = make()
        except PeerMissing as error:
            report.notes.append(f"left out: {error}")
            peer = None
        wanted = {"way": "train", "ids": "zipf", "rule": "adagrad"}
        for repeat in range(2 if quick else plan.repeats):
            print(f"{STEPS}: repeat {repeat + 1}", flush=True)
            try:
                turns[OURS].append(our_turn("zipf", 80 if quick else 240))
                if peer is not None:
                    with Crew(peer, [Place()] * (WORKERS + 2)) as crew:
                        answer = crew.ask(wanted, 1, 2 if quick else 5, deadline_seconds=90)[-1]
                    turns[name].append([answer["median"], answer["p10"], answer["p90"]])
            except (CrewFailed, JobFailed) as error:
                print(f"  {error}", flush=True)
                report.notes.append(in_a_line(str(error)))
                break
        report.add(_row(label, several) for label, several in turns.items() if several)

    def claims(report: Report) -> Iterator[Claim]:
        theirs, ours = report.find(STEPS, name, SIZE), report.find(STEPS, OURS, SIZE)
        what = f"{STEPS}: samples per second, against {name}"
        if theirs is None or ours is None:
            yield claim(what, None, 3.0)
            return
        speeds = (f"{row.contender} {WORKERS * BATCHES * SAMPLES / row.seconds:,.0f}" for row in (theirs, ours))
        yield claim(what, ratio(theirs, ours), 3.0, detail=", ".join(speeds))

    return Part(run, claims)


def _row(label: str, turns: Sequence[Turn]) -> Row:
    medians = tuple(statistics.median(turn) for turn in turns)
    p10, p90 = (statistics.median(quantile(turn, part) for turn in turns) for part in (0.1, 0.9))
    return Row(STEPS, label, SIZE, medians, p10, p90)


def clicks(
    report: Report, way: str, words: Sequence[str], options: Sequence[str], places: Sequence[Place], servers: int = 1
) -> dict[str, Any]:
    """What training on the click log told, by its way; nothing, with a note, if it failed."""
    try:
        with job(words, [str(CLICKS), *options], places, servers) as folder:
            return {way: json.loads((folder / "result.json").read_text())}
    except JobFailed as error:
        print(f"  {error}", flush=True)
        report.notes.append(in_a_line(str(error)))
        return {}


def slow_link(report: Report, plan: Plan, quick: bool) -> None:
    """The same log, in step and every 50 steps. What 50 steps of this log touch is about 5 times what one touches."""
    options = ["--rows", "20000" if quick else "400000", "--dim", "256"]
    told: dict[str, Any] = report.extra.setdefault("slow link", {})
    with network.network(hosts=2, per_host=1, mbits=MBITS) as places:
        for way in WAYS:
            print(f"{SLOW}: {way}", flush=True)
            told |= clicks(report, way, ["--strategy", way], options, places)


def claims_of_slow_link(report: Report) -> Iterator[Claim]:
    """More steps, and as much learnt."""
    told = report.extra.get("slow link", {})
    sync, geo = (told.get(way) for way in WAYS)
    both = sync is not None and geo is not None
    faster = Value(geo["samples_per_second"] / sync["samples_per_second"]) if both else None
    worse = Value(sync["auc"] - geo["auc"]) if both else None
    speeds = ", ".join(f"{way} {told[way]['samples_per_second']:,.0f} samples/s" for way in told)
    yield claim(f"{SLOW}, geo:50: steps per second, against sync", faster, 10.0, detail=speeds)
    learnt = ", ".join(f"{way} {told[way]['auc']:.4f} of {told[way]['best_auc']:.4f}" for way in told)
    yield claim(f"{SLOW}, geo:50: AUC lost against sync", worse, 0.005, "", at_most=True, detail=learnt)


SLOW_LINK = Part(slow_link, claims_of_slow_link, needs_network=True)


def modes(report: Report, plan: Plan, quick: bool) -> None:
    """The log by one process, and in each mode: two epochs.

    Two pairs of fields must be learnt, and without the second one 0.005 of AUC is missing. After one epoch it is luck
    whether those who go slower, `geo` most of all, have come to it.
    """
    options = ["--epochs", "2", "--rows", "20000" if quick else "800000"]
    told: dict[str, Any] = report.extra.setdefault("modes", {})
    for mode in (ALONE, *MODES):
        print(f"{LEARNT}: {mode or 'one process'}", flush=True)
        workers, servers = (LEARNERS, 2) if mode else (1, 0)
        words = ["--workers", str(workers), "--strategy", mode]
        told |= clicks(report, mode, words, options, [Place()], servers)


def claims_of_modes(report: Report) -> Iterator[Claim]:
    """How much less than one process each has learnt."""
    told = report.extra.get("modes", {})
    alone = told.get(ALONE)
    for mode in MODES:
        both = alone is not None and mode in told
        lost = Value(alone["auc"] - told[mode]["auc"]) if both else None
        detail = f"{told[mode]['auc']:.4f}, one process {alone['auc']:.4f} of {alone['best_auc']:.4f}" if both else ""
        yield claim(f"{LEARNT}, {mode}: AUC lost against one process", lost, 0.005, "", at_most=True, detail=detail)


MODES_LEARNT = Part(modes, claims_of_modes)
