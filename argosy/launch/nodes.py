"""The launchers of a job, one on each node: they find each other, agree, and share the fate of their workers.

All of it goes through the coordinator, which the launcher of node 0 runs. A launcher that disappears leaves a will
there, so the others learn of a lost node as they learn of a failed rank.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from argosy.control.client import Client, CoordinatorError, DeadlineExceeded, Will
from argosy.control.handshake import HandshakeError
from argosy.launch.failure import Failure

_GRACE_SECONDS = 2.0


class NodesDisagree(RuntimeError):
    """Launchers that were started with settings that do not make one job."""


@dataclass(frozen=True)
class Place:
    """A node's place in the job: the numbers of its first worker and server, and how many there are on all nodes."""

    first_rank: int
    world: int
    first_server: int
    servers: int
    run_folder: str


class Nodes:
    """This launcher's view of the others."""

    def __init__(self, client: Client, nodes: int, node_rank: int, timeout_seconds: float) -> None:
        self._client, self._nodes, self._node_rank = client, nodes, node_rank
        self._timeout_seconds = timeout_seconds
        self._will: Will | None = None
        self._claimed = self._lost = self._leaving = False

    async def claim(self, workers: int, servers: int, strategy: str, run_folder: Path) -> None:
        """Take this node's place, if it is free and this launcher was started as those of the job were."""
        await asyncio.to_thread(self._claim, workers, servers, strategy, run_folder)

    async def join(self) -> Place:
        """Wait for all launchers, and learn this one's place among them."""
        return await asyncio.to_thread(self._join)

    async def failure(self) -> Failure:
        """Wait until a rank or a node has failed anywhere, or the coordinator is lost."""
        while True:
            try:
                return Failure.from_json(await asyncio.to_thread(self._client.get, "job/failure", 3600.0))
            except DeadlineExceeded:
                continue
            except (ConnectionError, HandshakeError) as error:
                if self._leaving:
                    await asyncio.Event().wait()  # this is how it ends: nothing was lost
                self._lost = True
                return Failure("node 0 was lost", str(error), 1)

    async def worker_ended(self) -> int:
        """Count one more worker that has ended; how many have, on all nodes."""
        return await asyncio.to_thread(self._client.add, "workers/ended", 1)

    async def tell(self, failure: Failure) -> Failure:
        """Tell the others, unless another failure was told first; which of the two it was."""
        told = await self._within_grace(self._client.compare_set, "job/failure", b"", failure.to_json())
        return Failure.from_json(told) if isinstance(told, bytes) else failure

    async def part(self) -> None:
        """After a failure, leave together, so that the coordinator outlives what the others have to read."""
        await self._within_grace(self._client.barrier, "nodes/parted", self._nodes, _GRACE_SECONDS)
        await self._leave()

    async def finish(self) -> None:
        """Wait until all nodes have finished, so that the coordinator outlives its users."""
        try:
            await asyncio.to_thread(self._client.barrier, "nodes/finished", self._nodes, 7 * 24 * 3600.0)
        except ConnectionError:
            await asyncio.Event().wait()  # `failure` sees it too, and says what is to be said
        await self._leave()

    async def _leave(self) -> None:
        """Say goodbye; node 0, whose coordinator the others still hold on to, goes last."""
        self._leaving = True
        if self._will is not None:
            await self._within_grace(self._will.withdraw)
        if self._node_rank == 0:
            others = [f"nodes/left/{number}" for number in range(1, self._nodes)]
            await self._within_grace(self._client.wait, others, _GRACE_SECONDS)
        else:
            await self._within_grace(self._client.set, f"nodes/left/{self._node_rank}", b"")

    async def _within_grace(self, call: Callable[..., object], *arguments: object) -> object:
        """Make a last call to the coordinator; whoever cannot reach it any more has been noticed.

        A launcher that never had a place in the job has nothing to say to the others.
        """
        if self._claimed and not self._lost:
            with suppress(ConnectionError, TimeoutError, CoordinatorError):
                async with asyncio.timeout(_GRACE_SECONDS + 1):
                    return await asyncio.to_thread(call, *arguments)
        return None

    def _claim(self, workers: int, servers: int, strategy: str, run_folder: Path) -> None:
        mine = {
            "workers": workers,
            "servers": servers,
            "nodes": self._nodes,
            "strategy": strategy,
            "host": socket.gethostname(),
            "run_folder": run_folder.name,
            "launcher": secrets.token_hex(8),
        }
        if self._node_rank != 0:
            first = json.loads(self._client.get("nodes/0", self._timeout_seconds))
            if self._node_rank >= first["nodes"]:
                raise NodesDisagree(
                    f"--node-rank {self._node_rank}: the job at this address has {first['nodes']} nodes"
                )
        value = json.dumps(mine).encode()
        taken = self._client.compare_set(f"nodes/{self._node_rank}", b"", value)
        if taken != value:
            host = json.loads(taken)["host"]
            raise NodesDisagree(f"--node-rank {self._node_rank} is already taken by {host}; give each node its own")
        self._claimed = True
        lost = Failure(f"node {self._node_rank} was lost", f"its launcher on {mine['host']} has disappeared", 1)
        self._will = self._client.will("job/failure", lost.to_json())
        if self._node_rank != 0:
            for field in ("nodes", "strategy"):
                if first[field] != mine[field]:
                    raise NodesDisagree(
                        f"node 0 ({first['host']}) was started with {field} {first[field]!r} and node "
                        f"{self._node_rank} ({mine['host']}) with {mine[field]!r}; start all with the same"
                    )

    def _join(self) -> Place:
        try:
            self._client.barrier("nodes/joined", self._nodes, self._timeout_seconds)
        except DeadlineExceeded:
            missing = [number for number in range(self._nodes) if not self._client.check([f"nodes/{number}"])]
            which = ", ".join(map(str, missing))
            raise NodesDisagree(
                f"node {which} did not come within {self._timeout_seconds:g} s (timeout_seconds); start it with its "
                f"--node-rank, and check that it can reach {self._client.address}"
            ) from None
        all_nodes = [json.loads(self._client.get(f"nodes/{number}")) for number in range(self._nodes)]
        workers, servers = ([node[kind] for node in all_nodes] for kind in ("workers", "servers"))
        mine = self._node_rank
        return Place(sum(workers[:mine]), sum(workers), sum(servers[:mine]), sum(servers), all_nodes[0]["run_folder"])
