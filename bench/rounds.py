"""Measuring contenders in turns: in every repeat each has its turn at each size, so that drift hits all alike.

Crews are started anew several times, because where a process's memory happens to lie matters to its times.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from crew import Contender, Crew, CrewFailed, Place
from harness import Row


@dataclass(frozen=True)
class Plan:
    """How thoroughly to measure: starts of the crews, repeats in each, and about how long a turn takes.

    `warmup` is how many iterations precede those that count, for each of these.
    """

    launches: int = 2
    repeats: int = 5
    seconds: float = 0.25
    least_iterations: int = 3
    most_iterations: int = 5000
    warmup: float = 0.1


@dataclass(frozen=True)
class Entry:
    """A line of the table: an operation that a contender times at some sizes.

    The time is that of rank 0; or, of processes that work side by side and not together (`together`), the time in
    which they would do their work if each had the mean of their speeds. Ranks that tell that they only serve others
    do not count.
    """

    label: str
    contender: Contender
    sizes: Sequence[int]
    operation: Mapping[str, Any] = field(default_factory=dict)
    places: slice = field(default_factory=lambda: slice(None))
    together: bool = False


Case = tuple[Entry, int]


class Measured:
    """What was measured so far, and what could not be."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._turns: dict[tuple[str, int], list[dict[str, float]]] = {}

    def add(self, case: Case, turn: dict[str, float]) -> None:
        """Take in one turn."""
        self._turns.setdefault((case[0].label, case[1]), []).append(turn)

    def rows(self, setting: str) -> list[Row]:
        """A row for each case."""
        return [
            Row(
                setting,
                label,
                size,
                tuple(turn["median"] for turn in turns),
                statistics.median(turn["p10"] for turn in turns),
                statistics.median(turn["p90"] for turn in turns),
            )
            for (label, size), turns in self._turns.items()
        ]


def measure(setting: str, entries: Sequence[Entry], places: Sequence[Place], plan: Plan) -> tuple[list[Row], list[str]]:
    """Measure all entries in turns; the rows, and a note on each contender that failed."""
    measured = Measured()
    lost: set[str] = set()
    for launch in range(plan.launches):
        print(f"{setting}: start {launch + 1} of {plan.launches}", flush=True)
        with ExitStack() as stack:
            _one_launch(
                [entry for entry in entries if entry.contender.name not in lost], places, plan, measured, lost, stack
            )
    return measured.rows(setting), measured.notes


def _one_launch(
    entries: Sequence[Entry], places: Sequence[Place], plan: Plan, measured: Measured, lost: set[str], stack: ExitStack
) -> None:
    crews: dict[str, Crew] = {}

    def lose(name: str, error: Exception) -> None:
        print(f"  {error}", flush=True)
        measured.notes.append(in_a_line(str(error)))
        lost.add(name)

    for entry in entries:
        name = entry.contender.name
        if name not in crews and name not in lost:
            try:
                crews[name] = stack.enter_context(Crew(entry.contender, places[entry.places]))
            except CrewFailed as error:
                lose(name, error)
    iterations: dict[tuple[str, int], int] = {}
    for repeat in range(-1, plan.repeats):  # the one before the first finds out how many iterations a turn has
        for entry, size in in_turns(entries, repeat):
            name, key = entry.contender.name, (entry.label, size)
            if name in lost:
                continue
            try:
                if repeat < 0:
                    iterations[key] = _calibrate(crews[name], entry, size, plan)
                else:
                    measured.add((entry, size), _turn(crews[name], entry, size, iterations[key], plan))
            except CrewFailed as error:
                lose(name, error)


def in_a_line(text: str) -> str:
    """What failed, and the last word on why.

    >>> in_a_line("gloo: 0 of 2 ranks came\\nTraceback ...\\n  File ...\\nOSError: no such device\\n")
    'gloo: 0 of 2 ranks came: OSError: no such device'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ": ".join(lines[:1] + lines[1:][-1:])


def in_turns(entries: Sequence[Entry], repeat: int) -> Iterator[Case]:
    """Size by size, all entries that have it; who begins changes with the repeat."""
    first = repeat % max(1, len(entries))
    for size in sorted({size for entry in entries for size in entry.sizes}):
        for entry in [*entries[first:], *entries[:first]]:
            if size in entry.sizes:
                yield entry, size


def _turn(crew: Crew, entry: Entry, size: int, iterations: int, plan: Plan) -> dict[str, float]:
    warmup = max(1, int(iterations * plan.warmup)) if plan.warmup else 0
    answers = crew.ask({**entry.operation, "bytes": size}, warmup, iterations, deadline_seconds=90)
    if not entry.together:
        return dict(answers[0])
    workers = [answer for answer in answers if not answer.get("serves")]
    return {key: 1 / statistics.mean(1 / answer[key] for answer in workers) for key in ("median", "p10", "p90", "mean")}


def _calibrate(crew: Crew, entry: Entry, size: int, plan: Plan) -> int:
    seconds = _turn(crew, entry, size, 2, plan)["median"]
    if seconds < 1e-3:  # the first few say little about something so short
        seconds = _turn(crew, entry, size, 50, plan)["median"]
    return max(plan.least_iterations, min(plan.most_iterations, int(plan.seconds / seconds)))
