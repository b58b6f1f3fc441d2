"""Cutting a chain of pieces into stages so that the slowest stage is as fast as it can be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def partition(costs: Sequence[float], workers: Sequence[int]) -> list[int]:
    """Where stages begin, but the first: the piece of each. `workers` has how many share the work of each stage.

    Exact, by dynamic programming over (stage, piece). Every stage has at least one piece. Of cuts that are equally good
    for the slowest stage, the one with the least sum of squares is taken, so that the others are balanced too.

    >>> partition([1, 1, 1, 3], [1, 1])
    [3]
    >>> partition([3, 3, 3, 3], [3, 1])
    [3]
    """
    count, stages = len(costs), len(workers)
    assert count >= stages >= 1
    ends = [0.0, *itertools.accumulate(costs)]
    best: list[tuple[float, float, list[int]] | None] = [None] * (count + 1)
    best[0] = (0.0, 0.0, [])
    for stage in range(stages):
        following: list[tuple[float, float, list[int]] | None] = [None] * (count + 1)
        for end in range(stage + 1, count - (stages - stage - 1) + 1):
            options = []
            for begin in range(stage, end):
                if (before := best[begin]) is not None:
                    share = (ends[end] - ends[begin]) / workers[stage]
                    options.append((max(before[0], share), before[1] + share * share, [*before[2], begin]))
            following[end] = min(options, default=None)
        best = following
    chosen = best[count]
    assert chosen is not None
    return chosen[2][1:]
