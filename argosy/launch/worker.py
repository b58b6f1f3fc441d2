"""One process of a job, as the launcher holds it: started, listened to, and ended together with all its children.

It is a worker or, with another `role`, a parameter server. It leads its own session, so that its children (DataLoader
processes, say) can be ended with it.

[Note: ending a group safely]
The number of a process group may be given to others once its leader has been reaped. So the exit of a worker is
first looked at without reaping (the pidfd is readable, the zombie still holds its number), the rest of its group is
killed, and only then is it reaped.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress

from argosy.launch.screen import RankLog, Source
from argosy.observe import channel
from argosy.observe.events import Event
from argosy.observe.folder import Role

_PAUSE_SECONDS = 0.02


class Worker:
    """A running process. `status` is None until it has ended; negative for a signal, as in `subprocess`.

    `rank` is its number among those of its role, and `name` what it is called: "rank 2", "server 0".
    """

    def __init__(
        self,
        rank: int,
        log: RankLog,
        on_event: Callable[[Worker, Event], None],
        on_exit: Callable[[Worker], None],
        role: Role = "rank",
    ) -> None:
        self.rank, self.log, self.role, self.name = rank, log, role, f"{role} {rank}"
        self.status: int | None = None
        self.failure: Event | None = None
        self._traceback = ""
        self._on_event, self._on_exit = on_event, on_exit
        self._ended = asyncio.Event()

    async def start(self, module: str, arguments: list[str], environment: Mapping[str, str]) -> None:
        """Start a module of Argosy's as a program. It finds its end of the channel in ARGOSY_CHANNEL."""
        loop = asyncio.get_running_loop()
        self._channel, theirs = channel.pair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**environment, "ARGOSY_CHANNEL": str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._channel.setblocking(False)
        loop.add_reader(self._channel, self._read_channel)
        self._pipes: list[_Pipe] = []
        sources: tuple[Source, Source] = ("stdout", "stderr")
        for source in sources:
            stream = getattr(self._process, source)
            _, pipe = await loop.connect_read_pipe(functools.partial(_Pipe, self.log, source), stream)
            self._pipes.append(pipe)
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add_reader(self._pidfd, self._exited)

    def signal(self, number: int) -> None:
        """Send a signal to the worker and its children."""
        if self.status is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    async def ended(self) -> None:
        """Wait until the process has ended."""
        await self._ended.wait()

    async def drained(self, timeout_seconds: float = 2.0) -> None:
        """Wait until all that the worker wrote was read. Nothing holds its pipes open once its group was killed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                for pipe in self._pipes:
                    pipe.resume(whatever=True)  # at most a pipe's capacity is left
                    await pipe.closed.wait()

    def _exited(self) -> None:
        # See [Note: ending a group safely].
        self.signal(signal.SIGKILL)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._read_channel()
        loop.remove_reader(self._channel)
        self._channel.close()
        self.status = self._process.wait()
        self._ended.set()
        self._on_exit(self)

    def _read_channel(self) -> None:
        with suppress(BlockingIOError, ConnectionResetError, ValueError):
            while message := self._channel.recv(channel.MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT):
                event = json.loads(message)
                if event["event"] == "traceback":
                    self._traceback += event["text"]
                    continue
                if event["event"] == "failure":
                    self.failure = {**event, "traceback": self._traceback}
                self._on_event(self, event)
            asyncio.get_running_loop().remove_reader(self._channel)


class _Pipe(asyncio.Protocol):
    """One of a worker's output streams."""

    def __init__(self, log: RankLog, source: Source) -> None:
        self._log, self._source = log, source
        self._hurried = False
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The stream begins."""
        assert isinstance(transport, asyncio.ReadTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Pass the bytes on, and read no more while the screen is crowded."""
        self._log.data(self._source, data)
        if self._log.crowded and not self._hurried:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self.resume)

    def resume(self, whatever: bool = False) -> None:
        """Read on, if the screen takes more lines, or whatever it says."""
        self._hurried |= whatever
        if self._log.crowded and not self._hurried:
            asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self.resume)
        else:
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        """The stream has ended."""
        self.closed.set()
