"""Ranks of a group as processes that a test starts: forked from a server that has torch loaded, with a deadline."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

import torch
from forked import SERVER
from namespaces import enter
from torch.distributed import Store, TCPStore

from argosy.comm.config import CommConfig
from argosy.comm.engine import EngineGroup
from argosy.control.secret import Secret


@dataclass(frozen=True)
class Failed:
    """How a rank's function failed."""

    kind: str
    message: str
    at: float
    told: dict[str, Any]


@dataclass(frozen=True)
class Place:
    """What a rank's function is told: who it is, and how it joins groups."""

    rank: int
    size: int
    host_id: str | None
    secret: Secret
    store: Store

    def join(self, name: str = "test", ranks: Sequence[int] | None = None, **config: Any) -> EngineGroup:
        """Join the group of these ranks, or of all."""
        members = list(range(self.size)) if ranks is None else list(ranks)
        return EngineGroup.join(
            self.store,
            members.index(self.rank),
            len(members),
            config=CommConfig(**{"timeout_seconds": 20.0, **config}),
            secret=self.secret,
            host_id=self.host_id,
            name=name,
        )


Function = Callable[..., Any]


class Ranks:
    """Started ranks."""

    def __init__(self, processes: list[ForkServerProcess], results: list[Connection], store: Store | None) -> None:
        self.processes = processes
        self.store = store
        self._results = results

    def kill(self, rank: int, number: int = signal.SIGKILL) -> float:
        """Send a signal to a rank; returns when."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)
        return time.monotonic()

    def results(self, deadline_seconds: float = 60, ranks: Sequence[int] | None = None) -> list[Any]:
        """What the functions of these ranks, or of all, returned, or `Failed`."""
        end = time.monotonic() + deadline_seconds
        told = []
        for rank in ranks if ranks is not None else range(len(self.processes)):
            connection = self._results[rank]
            if not connection.poll(max(end - time.monotonic(), 0)):
                raise AssertionError(f"rank {rank} has no result after {deadline_seconds} s")
            try:
                told.append(connection.recv())
            except EOFError:
                told.append(Failed("died", f"status {self.processes[rank].exitcode}", time.monotonic(), {}))
        return told

    def end(self) -> None:
        """Kill whoever still runs."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(10)


@contextmanager
def started(
    function: Function,
    size: int,
    *arguments: Any,
    hosts: Sequence[str | None] | None = None,
    namespaces: Sequence[str] | None = None,
    store_at: str | None = None,
) -> Iterator[Ranks]:
    """Ranks that run `function(place, *arguments)`. Without a namespace for each, the test itself has their store."""
    ids = list(hosts) if hosts is not None else [None] * size
    store = None
    if store_at is None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        where = ("127.0.0.1", store.port)
    else:
        address, _, port = store_at.rpartition(":")
        where = (address, int(port))
    secret = Secret.new().hex()
    processes, results = [], []
    for rank in range(size):
        receiving, sending = SERVER.Pipe(duplex=False)
        namespace = namespaces[rank] if namespaces is not None else None
        place = (rank, size, ids[rank], secret, where, store is None and rank == 0, namespace)
        process = SERVER.Process(target=_rank, args=(place, function, arguments, sending), daemon=True)
        process.start()
        sending.close()
        processes.append(process)
        results.append(receiving)
    ranks = Ranks(processes, results, store)
    try:
        yield ranks
    finally:
        ranks.end()


def run(function: Function, size: int, *arguments: Any, deadline_seconds: float = 60, **options: Any) -> list[Any]:
    """What all ranks returned; raises if one failed."""
    with started(function, size, *arguments, **options) as ranks:
        results = ranks.results(deadline_seconds)
    for rank, result in enumerate(results):
        assert not isinstance(result, Failed), f"rank {rank}: {result.kind}: {result.message}"
    return results


def _rank(place: tuple[Any, ...], function: Function, arguments: tuple[Any, ...], results: Connection) -> None:
    rank, size, host_id, secret, (address, port), serves, namespace = place
    torch.set_num_threads(1)
    try:
        if namespace is not None:
            enter(namespace)
        store = TCPStore(address, port, is_master=serves, wait_for_workers=False)
        results.send(function(Place(rank, size, host_id, Secret.from_hex(secret), store), *arguments))
        if serves:
            time.sleep(1)  # whoever serves the store leaves last
    except BaseException as error:
        text = str(error) if not isinstance(error, AssertionError) else traceback.format_exc()
        simple = {name: value for name, value in vars(error).items() if isinstance(value, int | str)}
        results.send(Failed(type(error).__name__, text, time.monotonic(), simple))
