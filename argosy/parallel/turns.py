"""Buckets under compression, several at once: while what one has sent is under way, others are computed.

[Note: in step]
Operations of a group must be started in the same order by all its members, whatever is ready first on each. So nothing
here depends on time. When a bucket comes, its first step runs, then one step of each bucket before it, the latest
first: what the oldest waits for has been under way the longest. When no more buckets come, those that are left go on by
turns.
"""

from __future__ import annotations

from collections.abc import Iterator

from argosy.comm.pending import DONE, Pending

Steps = Iterator[Pending]


class Turns:
    """Runs the steps of buckets in turn."""

    def __init__(self) -> None:
        self._under_way: list[tuple[Steps, Pending]] = []  # each with what it waits for, the latest first

    def add(self, steps: Steps) -> None:
        """Another bucket: its first step, and one of each that is under way."""
        self._under_way.insert(0, (steps, DONE))
        self._turn()

    def drain(self) -> None:
        """Run all steps that are left."""
        while self._under_way:
            self._turn()

    def _turn(self) -> None:
        waiting, self._under_way = self._under_way, []  # if one fails, all are given up
        going_on = []
        for steps, exchange in waiting:
            exchange.wait()
            started = next(steps, None)
            if started is not None:
                going_on.append((steps, started))
        self._under_way = going_on
