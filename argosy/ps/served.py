"""What a worker has of its job's servers: a client of their tables and, in asynchronous modes, samples by lease."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from argosy._native import PsClient, PsError
from argosy.comm.living import add_up
from argosy.control.client import Client
from argosy.control.job import Job
from argosy.control.lease_client import LeaseClient
from argosy.control.meetings import Meetings
from argosy.data.batches import BatchConfig
from argosy.data.cursor import Cursor
from argosy.data.leased import LeasedLoader
from argosy.ps.config import PsConfig
from argosy.ps.geo import GeoStore
from argosy.ps.joining import join_servers
from argosy.ps.remote import RemoteStore
from argosy.ps.staleness import Staleness
from argosy.ps.store import Store


class Served:
    """A worker's servers: `store` has their tables."""

    def __init__(
        self, client: PsClient, job: Job, config: PsConfig, timeout_seconds: float, leaving: ExitStack
    ) -> None:
        self.client = client
        late = 0 < config.gathered(job.world) < job.world
        self.remote = RemoteStore(
            client, job.servers, config.consistency(), timeout_seconds, job.rank, may_be_late=late
        )
        steps = config.consistency().number if config.consistency().kind == "geo" else 0
        self.geo = GeoStore(self.remote, steps, job.world, rejects=config.rejects) if steps else None
        self._job, self._config = job, config
        self._queues: LeaseClient | None = None
        self._loaders: list[LeasedLoader] = []
        self._meetings: Meetings | None = None
        if config.bears_losses(job.world):
            assert job.coordinator is not None
            assert job.secret is not None
            coordinator = Client(job.coordinator, job.secret, who=f"rank {job.rank}", timeout_seconds=timeout_seconds)
            leaving.callback(coordinator.close)
            # A script that leaves the job and joins it again begins with queues and meetings of its own.
            self._generation = coordinator.add(f"leasing/{job.rank}", 1)
            self._meetings = Meetings(coordinator, f"meetings/{self._generation}", job.rank, job.world)
            self._queues = LeaseClient(coordinator) if config.has_leases else None

    @classmethod
    def join(cls, job: Job, config: PsConfig, timeout_seconds: float, leaving: ExitStack) -> Served:
        """Join the servers; what is to be done when the job is left goes onto the stack."""
        client = join_servers(job, config, timeout_seconds)
        leaving.callback(client.close)
        served = cls(client, job, config, timeout_seconds, leaving)
        leaving.callback(served._leave, timeout_seconds)
        return served

    @property
    def store(self) -> Store:
        """The tables, as embeddings see them."""
        return self.geo or self.remote

    @property
    def has_leases(self) -> bool:
        """Whether samples are taken from a queue, and not divided into shares."""
        return self._queues is not None

    @property
    def meets(self) -> bool:
        """Whether workers meet by `add_up`, as some may be lost, and not by collectives of their group."""
        return self._meetings is not None

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor of float64 by the sum of those of all workers that are there; they all call this."""
        assert self._meetings is not None
        add_up(tensor, self._meetings, self._job.world)

    def staleness(self) -> Staleness:
        """How old gradients were so far."""
        return Staleness.of(self.remote.stats())

    def tell_staleness(self, emit: Callable[..., None]) -> None:
        """The same as an event, if servers are there to ask."""
        with suppress(PsError):  # why one is gone, its own end says
            told = self.staleness()
            emit(
                "staleness",
                median=told.median,
                most=told.most,
                ages=told.ages,
                late=told.late,
                not_finite=told.not_finite,
            )

    def loader(
        self, script: DataLoader[Any], config: BatchConfig, cursor: Cursor, number: int, emit: Callable[..., None]
    ) -> LeasedLoader:
        """A loader whose samples are taken by lease. `number` tells it from the job's other loaders."""
        assert self._queues is not None
        name, world = f"samples/{self._generation}/{number}", self._job.world
        settle, samples = self.store.settle, self._config.lease_samples

        def rest() -> None:
            emit("rest")
            self.remote.rest()

        sent = self._config.steps_sent
        loader = LeasedLoader(script, config, world, cursor, self._queues, name, settle, samples, rest, sent, self.geo)
        self._loaders.append(loader)
        return loader

    def _leave(self, timeout_seconds: float) -> None:
        """Say goodbye when all that was sent has been applied, unless the script has failed."""
        try:
            if getattr(sys, "last_value", None) is None:
                for loader in self._loaders:
                    loader.leave()
                self.store.settle()
            with suppress(PsError):  # why a server is gone, its own end says
                self.client.leave(timeout_seconds)
        finally:
            self.client.close()
