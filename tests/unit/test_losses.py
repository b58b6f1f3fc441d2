"""Which workers a run can do without."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from argosy.launch.losses import Losses
from argosy.ps.config import PsConfig


@dataclass(eq=False)
class Ended:
    status: int
    failure: Any = None


@pytest.mark.parametrize(
    ("config", "statuses", "borne"),
    [
        (PsConfig(ps="async"), (-9, -9, -9), [True, True, False]),  # whoever is last is what the run has failed by
        (PsConfig(ps="sync", aggregate=2), (-9, -9, -9), [True, False, False]),
        (PsConfig(ps="async"), (1, -9, 0), [False, True, False]),  # a script's own failure is the run's
        (PsConfig(ps="sync"), (-9, -9, -9), [False, False, False]),
    ],
)
def test_of_workers_that_end_at_once_some_are_borne(
    config: PsConfig, statuses: tuple[int, ...], borne: list[bool]
) -> None:
    async def judged() -> list[bool]:
        losses = Losses(config, len(statuses), None)
        workers: list[Any] = [Ended(status) for status in statuses]
        return await asyncio.gather(*(losses.bears(worker, workers) for worker in workers))

    assert asyncio.run(judged()) == borne
