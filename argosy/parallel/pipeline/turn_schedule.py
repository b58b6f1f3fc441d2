"""Who does what when, in a pipeline whose stages have different numbers of workers.

The workers of a stage take turns: micro-batch i is the (i mod n)th one's. As in 1f1b, backward goes first, and a worker
has only so many micro-batches under way. The order is found by playing the pipeline with stages that take as long as
they have workers: a schedule that was played from beginning to end cannot wait for itself, as long as sending waits for
nobody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from argosy.parallel.pipeline.bubble import Action


def places(counts: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The workers of each stage, numbered through.

    >>> places([3, 1])
    {0: (0, 1, 2), 1: (3,)}
    """
    begins = [sum(counts[:stage]) for stage in range(len(counts))]
    return {stage: tuple(range(begin, begin + counts[stage])) for stage, begin in enumerate(begins)}


def turn_programs(counts: Sequence[int], micro_batches: int) -> dict[int, list[Action]]:
    """What each worker does, in order.

    >>> [f"{action.kind}{action.micro_batch}" for action in turn_programs([2, 1], 4)[0]]
    ['F0', 'F2', 'B0', 'B2']
    """
    workers = [
        _Worker(
            stage,
            counts[stage],
            math.ceil(sum(counts[stage:]) / counts[stage]),
            range(turn, micro_batches, counts[stage]),
        )
        for stage in range(len(counts))
        for turn in range(counts[stage])
    ]
    done: dict[tuple[str, int, int], float] = {}
    while True:
        options = [
            (begin, action.kind != "B", number, action)
            for number, worker in enumerate(workers)
            for begin, action in worker.options(done, len(counts))
        ]
        if not options:
            break
        begin, _, number, action = min(options)
        done[action.kind, action.stage, action.micro_batch] = workers[number].take(action, begin)
    assert all(len(worker.program) == 2 * len(worker.mine) for worker in workers)
    return {number: worker.program for number, worker in enumerate(workers)}


@dataclass
class _Worker:
    """One worker while the pipeline is played. `limit` is how many micro-batches it may have under way."""

    stage: int
    length: int
    limit: int
    mine: range
    clock: float = 0.0
    forward: int = 0
    backward: int = 0
    program: list[Action] = field(default_factory=list)

    def options(self, done: dict[tuple[str, int, int], float], stages: int) -> list[tuple[float, Action]]:
        """What could come next, and when."""
        found = []
        if self.forward < len(self.mine) and self.forward - self.backward < self.limit:
            number = self.mine[self.forward]
            ready = 0.0 if self.stage == 0 else done.get(("F", self.stage - 1, number))
            if ready is not None:
                found.append((max(self.clock, ready), Action("F", self.stage, number)))
        if self.backward < self.forward:
            number = self.mine[self.backward]
            after = ("F", self.stage, number) if self.stage + 1 == stages else ("B", self.stage + 1, number)
            if (ready := done.get(after)) is not None:
                found.append((max(self.clock, ready), Action("B", self.stage, number)))
        return found

    def take(self, action: Action, begin: float) -> float:
        """Do it; returns when it is done."""
        self.program.append(action)
        if action.kind == "F":
            self.forward += 1
        else:
            self.backward += 1
        self.clock = begin + self.length * (1 if action.kind == "F" else 2)
        return self.clock
