"""What servers count of old and late gradients, in words."""

from __future__ import annotations

import pytest

from argosy.ps.config import PsConfig
from argosy.ps.staleness import Staleness

OLD = (10, 0, 30, 10, *(0,) * 60, 1)


@pytest.mark.parametrize(
    ("ps", "ages", "most", "late", "tells"),
    [
        ("async", OLD, 70, (0, 0), "ps: gradients were 2 steps old in the median, 70 at most"),
        ("ssp:4", (3, 4, 0), 1, (0, 0), "ps: gradients were 1 step old in the median, 1 at most"),
        ("async", (0,) * 64 + (5,), 99, (0, 0), "ps: gradients were 64 or more steps old in the median, 99 at most"),
        ("half-async:4", (1, 0, 3, 0), 2, (0, 0), "ps: gradients were 2 pushes old in the median, 2 at most"),
        ("geo:50", (1, 3, 0), 1, (0, 0), "ps: what workers had learnt was 1 meeting old in the median, 1 at most"),
        ("sync", (100,), 0, (0, 0), None),
        ("sync", (100,), 0, (3, 0, 1), "ps: 4 gradients came late and were dropped (rank 0: 3, rank 2: 1)"),
        ("sync", (100,), 0, (0, 1), "ps: 1 gradient came late and was dropped (rank 1: 1)"),
        ("async", (0, 0), 0, (0, 0), None),
    ],
)
def test_a_line_at_the_end(ps: str, ages: tuple[int, ...], most: int, late: tuple[int, ...], tells: str | None) -> None:
    assert Staleness(ages, most, late).line(PsConfig(ps=ps).consistency()) == tells


def test_servers_are_taken_together() -> None:
    one = {"staleness": [5, 1], "stalest": 4, "late_by_client": [1, 0], "not_finite": 2}
    other = {"staleness": [0, 2], "stalest": 2, "late_by_client": [0, 3], "not_finite": 1}
    assert Staleness.of([one, other]) == Staleness((5, 3), 4, (1, 3), 3)
    assert Staleness.of([one, other]).median == 0
