"""How old gradients were when servers applied them, and how many came too late: what servers count, in words.

A gradient is as old as the steps that others made between the pull of the parameters it was computed with and its push.
Servers count for every push that they get, of a table or of dense parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from argosy.ps.config import Consistency

FIELDS: Final = ("staleness", "stalest", "late_by_client", "not_finite")
"""What is used of a server's statistics."""


@dataclass(frozen=True)
class Staleness:
    """The age of gradients in steps of other workers, and those that were dropped.

    `ages[n]` counts the pushes that were n steps old; the last one, those of as many steps or more. `late[rank]` is how
    many of a worker's steps were dropped: the same on all servers. `not_finite` counts rows and dense gradients that
    were left out, with `not_finite=count`.

    >>> Staleness(ages=(6, 1, 3), most=9, late=(0, 2)).median
    0
    """

    ages: tuple[int, ...]
    most: int
    late: tuple[int, ...]
    not_finite: int = 0

    @classmethod
    def of(cls, servers: Sequence[Mapping[str, Any]]) -> Staleness:
        """What several servers have counted (`FIELDS`).

        >>> Staleness.of([{"staleness": [1, 1], "stalest": 7, "late_by_client": [0, 0], "not_finite": 1}] * 2)
        Staleness(ages=(2, 2), most=7, late=(0, 0), not_finite=2)
        """
        ages = tuple(sum(several) for several in zip(*(each["staleness"] for each in servers), strict=True))
        late = tuple(max(several) for several in zip(*(each["late_by_client"] for each in servers), strict=True))
        broken = sum(each["not_finite"] for each in servers)
        return cls(ages, max(each["stalest"] for each in servers), late, broken)

    @property
    def median(self) -> int:
        """The age that half of the pushes did not exceed; at most what `ages` tells apart."""
        half, below = sum(self.ages) / 2, 0
        for age, count in enumerate(self.ages):
            below += count
            if below >= half:
                return age
        return 0

    def line(self, mode: Consistency) -> str | None:
        """What a user is told at the end; None if there is nothing to tell.

        >>> Staleness((5,), 0, (0,), not_finite=3).line(Consistency("sync"))
        'ps: 3 gradients were not finite and were left out'
        >>> Staleness((5, 8, 2, 1), 9, (0, 0)).line(Consistency("async"))
        'ps: gradients were 1 step old in the median, 9 at most'
        >>> Staleness((80,), 0, (1, 0, 11)).line(Consistency("sync"))
        'ps: 12 gradients came late and were dropped (rank 0: 1, rank 2: 11)'
        """
        were = _were(self.not_finite)
        broken = f"{_count(self.not_finite, 'gradient')} {were} not finite and {were} left out"
        told = [part for part in (self._ages(mode), broken if self.not_finite else None) if part is not None]
        return f"ps: {'; '.join(told)}" if told else None

    def _ages(self, mode: Consistency) -> str | None:
        if mode.kind == "sync":  # what is applied is never old
            by = ", ".join(f"rank {rank}: {count}" for rank, count in enumerate(self.late) if count)
            total = sum(self.late)
            return f"{_count(total, 'gradient')} came late and {_were(total)} dropped ({by})" if total else None
        if not sum(self.ages):
            return None
        more = " or more" if self.median == len(self.ages) - 1 else ""
        what, unit = ("gradients", "step")
        if mode.kind == "geo":
            what, unit = "what workers had learnt", "meeting"
        if mode.kind == "half-async":
            unit = "push"
        was = "was" if mode.kind == "geo" else "were"
        return f"{what} {was} {_count(self.median, unit, more)} old in the median, {self.most} at most"


def _count(number: int, thing: str, more: str = "") -> str:
    plural = thing if number == 1 and not more else thing + ("es" if thing.endswith("sh") else "s")
    return f"{number}{more} {plural}"


def _were(number: int) -> str:
    return "was" if number == 1 else "were"
