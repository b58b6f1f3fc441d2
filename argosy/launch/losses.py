"""Which workers a job can do without: one that is killed does not end a run whose others can finish it.

Where workers take samples by lease, what a lost one held returns to the queue: the job goes on while anybody lives.
Where a step waits for fewer gradients than there are workers, it goes on while so many live. Everywhere else, and for a
script that fails by itself, a worker's end is the run's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from argosy.control.client import CoordinatorError
from argosy.launch.failure import signal_name
from argosy.launch.nodes import Nodes
from argosy.launch.worker import Worker
from argosy.ps.config import PsConfig


class Losses:
    """The workers that were lost, as one launcher knows them."""

    def __init__(self, config: PsConfig, world: int, nodes: Nodes | None) -> None:
        self._leases, self._needed, self._world = config.has_leases, config.needed(world), world
        self._nodes = nodes
        self._verdicts: dict[Worker, asyncio.Future[bool]] = {}

    async def bears(self, worker: Worker, here: Sequence[Worker]) -> bool:
        """Whether the run goes on without a worker that has ended; `here` are those of this node. Decided once."""
        if self._needed >= self._world:
            return False
        if worker not in self._verdicts:
            self._verdicts[worker] = asyncio.get_running_loop().create_future()
            self._verdicts[worker].set_result(await self._decide(worker, here))
        return await self._verdicts[worker]

    def has_borne(self, worker: Worker) -> bool:
        """Whether the run went on without this one."""
        verdict = self._verdicts.get(worker)
        return verdict is not None and verdict.done() and verdict.result()

    def told(self, worker: Worker) -> str:
        """What to tell the user."""
        assert worker.status is not None
        what = f"{worker.name} was lost (killed by {signal_name(worker.status)})"
        if self._leases:
            return f"{what}; its samples go to the others"
        return f"{what}; its gradients are missing from now on, and a step waits for {self._needed} (aggregate)"

    async def _decide(self, worker: Worker, here: Sequence[Worker]) -> bool:
        if self._nodes is None:
            living = len(here) - len(self._verdicts)  # of several that end at once, one is the last
        else:
            try:
                living = self._world - await self._nodes.worker_ended()
            except (OSError, CoordinatorError):
                return False  # without a coordinator nobody goes on
        killed = worker.status is not None and worker.status < 0 and worker.failure is None
        return killed and living >= self._needed
