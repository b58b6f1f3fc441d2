"""The bubble: the part of a step in which the workers of a pipeline wait, by theory and as measured.

The theory is the schedule itself, played with a forward that takes 1, a backward that takes 2 (for inputs 1, for
weights 1) and messages that take nothing. For `gpipe` and `1f1b` this is the textbook's (p - 1) / (m + p - 1).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

_LENGTHS = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}


class Action(NamedTuple):
    """F: forward, B: backward, I: backward for inputs only, W: for weights only; of a stage, on a micro-batch."""

    kind: str
    stage: int
    micro_batch: int


def theory(programs: Mapping[int, Sequence[Action]], lengths: Mapping[int, float] | None = None) -> float:
    """The idle part of the workers' time, until the last one is done. `lengths` has what a forward of a stage takes.

    >>> serial = {0: [Action("F", 0, 0), Action("B", 0, 0)], 1: [Action("F", 1, 0), Action("B", 1, 0)]}
    >>> theory(serial)
    0.5
    """
    stages = 1 + max(action.stage for program in programs.values() for action in program)
    done: dict[tuple[str, int, int], float] = {}
    clocks, at = dict.fromkeys(programs, 0.0), dict.fromkeys(programs, 0)
    busy = 0.0
    while any(at[worker] < len(program) for worker, program in programs.items()):
        moved = False
        for worker, program in programs.items():
            while at[worker] < len(program):
                action = program[at[worker]]
                needed = [done.get(each) for each in _needs(action, stages)]
                if any(each is None for each in needed):
                    break
                begin = max([clocks[worker], *(each for each in needed if each is not None)])
                length = _LENGTHS[action.kind] * (lengths[action.stage] if lengths else 1.0)
                clocks[worker], busy = begin + length, busy + length
                done["B" if action.kind == "I" else action.kind, action.stage, action.micro_batch] = clocks[worker]
                at[worker] += 1
                moved = True
        if not moved:
            raise ValueError(
                f"the schedule waits for itself: {[p[at[w]] for w, p in programs.items() if at[w] < len(p)]}"
            )
    return 1 - busy / (len(programs) * max(clocks.values()))


def in_line(workers: int, micro_batches: int, ahead: bool) -> dict[int, list[Action]]:
    """What workers with one stage each do: all forward first (`ahead`, gpipe), or backward as soon as it can be (1f1b).

    >>> [f"{action.kind}{action.micro_batch}" for action in in_line(2, 3, ahead=False)[0]]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    programs = {}
    for worker in range(workers):
        warmup = micro_batches if ahead else min(micro_batches, workers - worker)
        program = [Action("F", worker, number) for number in range(warmup)]
        for number in range(micro_batches):
            program.append(Action("B", worker, number))
            if warmup + number < micro_batches:
                program.append(Action("F", worker, warmup + number))
        programs[worker] = program
    return programs


def _needs(action: Action, stages: int) -> list[tuple[str, int, int]]:
    kind, stage, micro_batch = action
    if kind == "F":
        return [("F", stage - 1, micro_batch)] if stage else []
    if kind == "W":
        return [("B", stage, micro_batch)]
    following = [("B", stage + 1, micro_batch)] if stage + 1 < stages else []
    return [("F", stage, micro_batch), *following]


class Meter:
    """Times a worker's own work in a step, and what part of all workers' time is idle."""

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        self._bubbles: list[float] = []

    @contextmanager
    def working(self) -> Iterator[None]:
        """This block is work."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.busy_seconds += time.perf_counter() - begun

    def stepped(self, busy_seconds: float, wall_seconds: float) -> None:
        """A step is over: the sums of all workers."""
        self._bubbles.append(1 - busy_seconds / wall_seconds)

    @property
    def steps(self) -> int:
        """How many steps were measured."""
        return len(self._bubbles)

    @property
    def measured(self) -> float | None:
        """The idle part: the median of the last steps."""
        return statistics.median(self._bubbles[-20:]) if self._bubbles else None
