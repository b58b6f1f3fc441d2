"""The launcher: starts this node's workers and servers, shows what they say, and sees to it that they end together.

It runs the coordinator (on node 0), starts one process for each server and each worker, and then waits for the first
of: all workers done, one failed, another node failed, a signal. Whatever it is, no process is left when `Launcher.run`
returns. Servers end after the workers. Where the job can bear it, a worker that is killed does not end the run
(`losses.py`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import resource
import signal
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from argosy.control.client import Client, parse_address
from argosy.control.coordinator import Coordinator
from argosy.control.job import Job
from argosy.control.network import interface_towards
from argosy.control.secret import Secret
from argosy.launch.failure import Failure, ended, shell_status
from argosy.launch.launch import Launch
from argosy.launch.losses import Losses
from argosy.launch.nodes import Nodes, NodesDisagree, Place
from argosy.launch.screen import RankLog, Screen
from argosy.launch.threads import thread_variables
from argosy.launch.worker import Worker
from argosy.observe.events import Event, record_end
from argosy.observe.folder import events_file, log_file, new_run_folder
from argosy.optim.tiles import tile_variables
from argosy.parallel.memory import memory_variables
from argosy.ps.config import PsConfig
from argosy.ps.staleness import Staleness
from argosy.strategy import ConfigError

_GRACE_SECONDS = 3.0  # between asking workers to end and making them
_ECHO_SECONDS = 0.5  # how long an error that only says "a peer was lost" waits for the peer's own account

T = TypeVar("T")


def _allow_many_connections() -> None:
    """Every worker connects to the coordinator: use all the descriptors that the system grants."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _count(number: int | str, thing: str) -> str:
    return f"{number} {thing}" if str(number) == "1" else f"{number} {thing}s"


class Stopped(Exception):
    """The run is to end early."""

    def __init__(self, failure: Failure, culprit: Worker | None = None, signalled: bool = False) -> None:
        super().__init__(failure.what)
        self.failure, self.culprit, self.signalled = failure, culprit, signalled


class Launcher:
    """One run of a script on this node."""

    def __init__(self, launch: Launch, screen: Screen) -> None:
        launch.check()
        self._launch, self._screen = launch, screen
        self._workers: list[Worker] = []
        self._servers: list[Worker] = []
        self._servers_may_end = False
        self._counted: list[Event] = []  # by servers, in the end
        self._nodes: Nodes | None = None
        self._losses = Losses(PsConfig(), launch.workers, None)
        self._watcher: asyncio.Task[None] | None = None
        self._judging: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Run to the end; the exit status of the first rank that failed, or 0."""
        _allow_many_connections()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # who ignores it never learns how a child has ended
        self._stopped: asyncio.Future[Stopped] = asyncio.get_running_loop().create_future()
        self._listen_to_signals()
        async with AsyncExitStack() as stack:
            address, secret = await stack.enter_async_context(self._coordinator())
            try:
                place = await self._unless_stopped(self._find_place(stack, address, secret))
                await self._start_all(place, address, secret)
                await self._unless_stopped(self._all_done())
                await self._end_servers()
                self._blame_servers()
                self._tell_staleness()
                return 0
            except Stopped as stopped:
                return await self._end(stopped)
            except (NodesDisagree, ConfigError) as error:
                if self._nodes is not None:
                    await self._nodes.tell(Failure(f"node {self._launch.node_rank} failed", str(error), 2))
                    await self._nodes.part()
                raise
            finally:
                await self._kill_all()

    @asynccontextmanager
    async def _coordinator(self) -> AsyncIterator[tuple[str, Secret]]:
        """The coordinator's address and secret; node 0 runs it."""
        launch = self._launch
        if launch.node_rank != 0:
            assert launch.coordinator is not None
            assert launch.secret is not None
            yield launch.coordinator, launch.secret
            return
        host, port = parse_address(launch.coordinator) if launch.coordinator else ("127.0.0.1", 0)
        try:
            coordinator = await Coordinator.start(launch.secret, host=host, port=port)
        except OSError as error:
            fix = "give an address of this machine, and a port that is free"
            raise ValueError(f"--coordinator {launch.coordinator}: cannot listen there ({error}); {fix}") from error
        if launch.nodes > 1 and ipaddress.ip_address(parse_address(coordinator.address)[0]).is_loopback:
            self._screen.say(f"{launch.coordinator} is {coordinator.address} here: other machines cannot reach that")
        try:
            yield coordinator.address, coordinator.secret
        finally:
            await coordinator.stop()

    async def _find_place(self, stack: AsyncExitStack, address: str, secret: Secret) -> Place:
        launch = self._launch
        folder = launch.run_folder or (new_run_folder(launch.script) if launch.node_rank == 0 else Path("runs"))
        if launch.nodes == 1:
            place = Place(0, launch.workers, 0, launch.servers, folder.name)
        else:
            self._screen.say(f"node {launch.node_rank}: waiting for {launch.nodes} nodes at {address}")
            timeout_seconds = launch.chosen.timeout_seconds
            client = Client(
                address, secret, who=f"node {launch.node_rank}", timeout_seconds=60.0, connect_seconds=timeout_seconds
            )
            stack.callback(client.close)
            self._nodes = Nodes(client, launch.nodes, launch.node_rank, timeout_seconds)
            await self._nodes.claim(launch.workers, launch.servers, launch.chosen.to_line(), folder)
            self._watcher = asyncio.create_task(self._watch(self._nodes))
            place = await self._nodes.join()
        launch.chosen.check_workers(place.world, place.servers)
        self._losses = Losses(launch.chosen.part(PsConfig), place.world, self._nodes)
        self._folder = launch.run_folder or Path("runs") / place.run_folder
        self._folder.mkdir(parents=True, exist_ok=True)
        return place

    async def _start_all(self, place: Place, address: str, secret: Secret) -> None:
        launch = self._launch
        threads = thread_variables(launch.threads, launch.workers, os.environ)
        each = {**os.environ, **threads}["OMP_NUM_THREADS"]
        where = f" on {launch.nodes} nodes, {launch.workers} here" if launch.nodes > 1 else ""
        served = f", and {_count(place.servers, 'server')}" if place.servers else ""
        self._screen.say(
            f"{_count(place.world, 'worker')}{where}, {_count(each, 'thread')} each{served}; "
            f"logs and events in {self._folder}/"
        )
        # What an outer job told this process is not for the workers of this one; what host it is on, is.
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("ARGOSY_") or name == "ARGOSY_HOST_ID"
        }
        environment |= threads | memory_variables(os.environ) | tile_variables(os.environ)
        interface = interface_towards(*parse_address(address))
        if interface is not None:
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        job = Job(
            world=place.world,
            servers=place.servers,
            coordinator=address,
            secret=secret,
            strategy=launch.strategy.to_line() if launch.strategy is not None else None,
            run_folder=self._folder.absolute(),  # the script may change its directory
        )
        await self._start_servers(place, {**environment, **job.environment()})
        for rank in range(place.first_rank, place.first_rank + launch.workers):
            if self._stopped.done():
                return
            worker = Worker(rank, RankLog(self._screen, self._folder, rank), self._heard, self._exited)
            own = {**environment, **replace(job, rank=rank).environment()}
            await worker.start("argosy.launch.bootstrap", [launch.script, *launch.arguments], own)
            self._workers.append(worker)

    async def _start_servers(self, place: Place, environment: Mapping[str, str]) -> None:
        config = self._launch.chosen.part(PsConfig)
        for number in range(place.first_server, place.first_server + self._launch.servers):
            if self._stopped.done():
                return
            log = RankLog(self._screen, self._folder, number, "server")
            server = Worker(number, log, self._heard, self._server_exited, "server")
            options = [f"--number={number}", f"--workers={place.world}", f"--not-finite={config.not_finite}"]
            options.append(f"--aggregate={config.gathered(place.world)}")
            await server.start("argosy.ps.serve", options, environment)
            self._servers.append(server)

    async def _all_done(self) -> None:
        """Return when every worker, here and on the other nodes, has ended well."""
        for worker in self._workers:
            await worker.ended()
            if worker.status != 0 and not await self._losses.bears(worker, self._workers):
                await asyncio.Event().wait()  # what it told, or its exit, stops the run
        await self._drained()
        if self._nodes is not None:
            self._screen.say("all workers here are done; waiting for the other nodes")
            await self._nodes.finish()

    # What may stop a run: a worker's exit, its account of a failure, another node, a signal.

    def _exited(self, worker: Worker) -> None:
        if self._stopped.done():
            return
        self._judging.add(task := asyncio.create_task(self._judge(worker)))
        task.add_done_callback(self._judging.discard)

    async def _judge(self, worker: Worker) -> None:
        """Whether a worker's end is one for the whole run."""
        if not await self._losses.bears(worker, self._workers):
            if worker.status and worker.failure is None:
                self._blame(worker, worker.status, ended(worker.status))
        elif worker.status and not self._stopped.done():
            self._screen.say(self._losses.told(worker))
            record_end(events_file(self._folder, worker.rank), worker.rank, ended(worker.status))

    def _server_exited(self, server: Worker) -> None:
        if not self._servers_may_end and server.failure is None and server.status is not None:
            early = "" if server.status else ", before the workers had"
            self._blame(server, server.status or 1, ended(server.status) + early)

    def _heard(self, worker: Worker, event: Event) -> None:
        if event["event"] == "failure":
            delay = _ECHO_SECONDS if event["secondary"] else 0.0
            asyncio.get_running_loop().call_later(delay, self._blame, worker, event["status"], event["message"])
        elif event["event"] == "counted":
            self._counted.append(event)
        elif worker.name == "rank 0":
            self._screen.event(event)

    def _blame(self, worker: Worker, status: int, detail: str) -> None:
        traceback = worker.failure["traceback"] if worker.failure else ""
        failure = Failure(f"{worker.name} failed", detail, shell_status(status), traceback)
        self._stop(Stopped(failure, culprit=worker))

    async def _watch(self, nodes: Nodes) -> None:
        self._stop(Stopped(await nodes.failure()))

    def _listen_to_signals(self) -> None:
        def received(number: signal.Signals) -> None:
            # Workers get the signal that a terminal would have sent them; asked twice, they end at once.
            for worker in self._workers:  # servers end when no worker needs them
                worker.signal(signal.SIGKILL if self._stopped.done() else number)
            where = f" by the launcher of node {self._launch.node_rank}" if self._launch.nodes > 1 else ""
            self._stop(Stopped(Failure(f"{number.name} was received{where}", "", 128 + number), signalled=True))

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # as under nohup
            asyncio.get_running_loop().add_signal_handler(number, received, number)

    def _stop(self, stopped: Stopped) -> None:
        if not self._stopped.done():
            self._stopped.set_result(stopped)
            if not stopped.signalled:
                for process in (*self._workers, *self._servers):
                    process.log.shown = process is stopped.culprit

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of some work, unless the run is stopped first."""
        task = asyncio.create_task(work)
        either: list[asyncio.Future[Any]] = [task, self._stopped]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._stopped.done():
            task.cancel()
            raise self._stopped.result()
        return task.result()

    async def _end(self, stopped: Stopped) -> int:
        """End the workers, tell why, and say what status the run has."""
        failure, culprit = stopped.failure, stopped.culprit
        running = [worker for worker in self._workers if worker is not culprit and worker.status != 0]
        others = [worker for worker in running if not self._losses.has_borne(worker)]
        if not stopped.signalled:
            for worker in others:
                worker.signal(signal.SIGTERM)
        ending = asyncio.create_task(self._ended_within(others, _GRACE_SECONDS))
        status = failure.status
        if self._nodes is not None:
            status = (await self._nodes.tell(failure)).status
        if culprit is not None:
            await self._ended_within([culprit], _GRACE_SECONDS)
            await culprit.drained()
        self._screen.end_progress()
        self._tell(failure, culprit)
        await ending
        await self._end_servers()
        for process in (*self._workers, *self._servers):
            if process.status and process.failure is None:
                record_end(events_file(self._folder, process.rank, process.role), process.rank, ended(process.status))
        for worker in others:
            if worker.failure is not None:
                worker.log.record(worker.failure["traceback"])
            self._screen.say(f"{worker.name} stopped because {failure.what}")
        if self._nodes is not None:
            await self._nodes.part()
        return status

    def _tell(self, failure: Failure, culprit: Worker | None) -> None:
        """The failure's own account, whole, then one line that sums it up."""
        if culprit is not None and failure.traceback:
            culprit.log.text(failure.traceback)
        elif failure.traceback:
            for line in failure.traceback.rstrip("\n").split("\n"):
                self._screen.say(line)
        log = f"; its log is {log_file(self._folder, culprit.rank, culprit.role)}" if culprit is not None else ""
        self._screen.say(failure.what + (f": {failure.detail}" if failure.detail else "") + log)

    async def _end_servers(self) -> None:
        """No worker needs them any more."""
        self._servers_may_end = True
        for server in self._servers:
            server.signal(signal.SIGTERM)
        await self._ended_within(self._servers, _GRACE_SECONDS)

    def _tell_staleness(self) -> None:
        """How old gradients were, as this node's servers have counted."""
        if self._counted:
            told = Staleness.of(self._counted).line(self._launch.chosen.part(PsConfig).consistency())
            if told is not None:
                self._screen.say(told)

    def _blame_servers(self) -> None:
        """A server that does not end well has failed, though all workers are done."""
        for server in self._servers:
            if server.status:
                detail = server.failure["message"] if server.failure else f"{ended(server.status)}, at its end"
                traceback = server.failure["traceback"] if server.failure else ""
                failure = Failure(f"{server.name} failed", detail, shell_status(server.status), traceback)
                raise Stopped(failure, culprit=server)

    async def _ended_within(self, workers: list[Worker], seconds: float) -> None:
        """Wait for workers to end by themselves; then end them."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(worker.ended() for worker in workers))
        for worker in workers:
            worker.signal(signal.SIGKILL)
        await asyncio.gather(*(worker.ended() for worker in workers))

    async def _kill_all(self) -> None:
        self._servers_may_end = True
        everybody = [*self._workers, *self._servers]
        for process in everybody:
            process.signal(signal.SIGKILL)
        await asyncio.gather(*(process.ended() for process in everybody))
        await self._drained()
        if self._watcher is not None:
            self._watcher.cancel()

    async def _drained(self) -> None:
        """Wait until all that the processes wrote was read, and close the logs of those that have ended."""
        gone = [process for process in (*self._workers, *self._servers) if process.status is not None]
        await asyncio.gather(*(process.drained() for process in gone))
        for process in gone:
            process.log.close()
