"""Which queues are finished, in little memory: a job has as many as it has epochs, and of each one may still be asked.

A worker may come late to an epoch that others have finished. It is not to find the queue gone, and make it anew.
"""

from __future__ import annotations


class Past:
    """Names such as `train/7`, kept as runs of numbers: one epoch follows another.

    >>> past = Past()
    >>> for number in range(1000):
    ...     past.add(f"train/{number}")
    >>> "train/999" in past, "train/1000" in past, len(past)
    (True, False, 1)
    """

    def __init__(self) -> None:
        self._runs: dict[str, list[range]] = {}

    def add(self, name: str) -> None:
        """Remember a name."""
        stem, number = _parts(name)
        runs = self._runs.get(stem, [])
        near = [run for run in runs if run.start <= number + 1 and number <= run.stop]
        begin, end = min([number, *(run.start for run in near)]), max([number + 1, *(run.stop for run in near)])
        self._runs[stem] = [*(run for run in runs if run not in near), range(begin, end)]

    def __contains__(self, name: str) -> bool:
        stem, number = _parts(name)
        return any(number in run for run in self._runs.get(stem, ()))

    def __len__(self) -> int:
        """How many runs there are."""
        return sum(len(runs) for runs in self._runs.values())


def _parts(name: str) -> tuple[str, int]:
    """What stands before the number that a name ends with, and the number; -1 and the whole name without one."""
    stem, slash, number = name.rpartition("/")
    counts = slash and number.isascii() and number.isdecimal() and str(int(number)) == number
    return (stem + slash, int(number)) if counts else (name, -1)
