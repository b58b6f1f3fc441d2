"""The coordinator: a small authenticated service of keys, barriers and leases that the launcher starts for a job.

Processes find each other through it, and torch's process groups rendezvous through it (`store`), instead of through
an open `TCPStore`. This file is the door: it listens, lets peers prove the job's secret (`handshake`), hands those
who did to a `session`, and drops everybody else in bounded time and memory. What is kept is in `table`, `barriers` and
`leases`; the bounds are in `limits`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import logging
import resource
import socket
from typing import Final

from argosy.control import wire
from argosy.control.barriers import Barriers
from argosy.control.handshake import HandshakeError, NoRoomError, accept_async
from argosy.control.leases import Leases
from argosy.control.limits import SMALL_MESSAGE_BYTES, ByteBudget, Limits
from argosy.control.secret import Secret
from argosy.control.session import Session
from argosy.control.table import Table

_BACKLOG: Final = 4096
_DESCRIPTORS_KEPT_FREE: Final = 128
_REFUSALS_SHOWN: Final = 20
_CLOSE_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 0.1
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

# What `accept` says about the other side; only ever logged.
_Peer = object

_log = logging.getLogger(__name__)


class Coordinator:
    """A running coordinator; made by `await Coordinator.start(...)`, ended by `await stop()`.

    >>> async def example() -> bytes:
    ...     coordinator = await Coordinator.start(Secret.new())
    ...     client = Client(coordinator.address, coordinator.secret)
    ...     await asyncio.to_thread(client.set, "greeting", b"ahoy")
    ...     value = await asyncio.to_thread(client.get, "greeting")
    ...     client.close()
    ...     await coordinator.stop()
    ...     return value
    >>> from argosy.control.client import Client
    >>> asyncio.run(example())
    b'ahoy'
    """

    def __init__(self, secret: Secret, limits: Limits, listener: socket.socket) -> None:
        self.secret: Final = secret
        self._limits = limits
        self._max_pending, self._max_connections = _affordable(limits)
        self._table = Table(limits.max_keys, limits.max_stored_bytes)
        self._barriers = Barriers()
        self._leases = Leases()
        self._budget = ByteBudget(limits.max_inflight_bytes)
        # The tasks of all connections, and of those that have not proved themselves, oldest first.
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending: dict[asyncio.Task[None], _Peer] = {}
        self._connections = 0
        self._refusals = 0
        self._stopping = False
        self._listener = listener
        host, port = listener.getsockname()[:2]
        self._address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._door = asyncio.get_running_loop().create_task(self._accept())

    @classmethod
    async def start(
        cls,
        secret: Secret | None,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: Limits = Limits(),  # noqa: B008  (frozen)
    ) -> Coordinator:
        """Listen on `host`:`port` (0: any free port) and serve in the running event loop.

        Without a secret it makes one itself, and then listens on loopback only.
        """
        listener = await _listen(host, port, beyond_loopback=secret is not None)
        return cls(secret or Secret.new(), limits, listener)

    @property
    def address(self) -> str:
        """Where it listens, as `host:port`; the host is numeric."""
        return self._address

    async def stop(self) -> None:
        """Close the door and every connection; when this returns no task or socket is left."""
        self._stopping = True
        ending = {self._door, *self._tasks}
        for task in ending:
            task.cancel()
        await asyncio.wait(ending)
        self._listener.close()
        # A transport closes its socket in the turn of the loop after it was told to.
        await asyncio.sleep(0)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(self._listener)
            except OSError as error:
                _log.warning("coordinator %s: cannot accept a connection: %s", self.address, error)
                await asyncio.sleep(_PAUSE_SECONDS if error.errno in _EXHAUSTED else 0)
                continue
            self._admit_to_handshake(sock, peer)
            # One newcomer in each turn of the loop, so that a crowd at the door does not hold up those inside.
            await asyncio.sleep(0)

    def _admit_to_handshake(self, sock: socket.socket, peer: _Peer) -> None:
        if len(self._pending) >= self._max_pending:
            oldest = next(iter(self._pending))
            self._refused(self._pending.pop(oldest), "dropped to make room, it had not proved itself yet")
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(self._serve(sock, peer))
        self._tasks.add(task)
        self._pending[task] = peer
        task.add_done_callback(functools.partial(self._ended, sock))

    def _ended(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        # Here and not in the task: one that is cancelled before its first step never gets to close anything.
        sock.close()
        self._tasks.discard(task)
        self._pending.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a session of the coordinator failed", exc_info=task.exception())

    async def _serve(self, sock: socket.socket, peer: _Peer) -> None:
        """Take one connection from its first byte to its last."""
        try:
            wire.tune_socket(sock)
            async with asyncio.timeout(self._limits.handshake_seconds):
                await accept_async(sock, self.secret, admit=self._admit)
            task = asyncio.current_task()
            assert task is not None
            self._pending.pop(task, None)
            try:
                await self._converse(sock)
            finally:
                self._connections -= 1
        except (HandshakeError, NoRoomError, wire.WireError) as error:
            self._refused(peer, str(error))
        except TimeoutError:
            self._refused(peer, "it took too long to send or to receive")
        except OSError as error:
            # Workers that are killed end like this, so it is no news.
            _log.debug("coordinator %s: peer %s went away (%s)", self.address, peer, type(error).__name__)

    async def _converse(self, sock: socket.socket) -> None:
        # From here on the transport owns the descriptor, and closing `sock` does nothing.
        proved = socket.socket(fileno=sock.detach())
        reader, writer = await asyncio.open_connection(sock=proved, limit=SMALL_MESSAGE_BYTES)
        session = Session(reader, writer, self._table, self._barriers, self._leases, self._budget, self._limits)
        try:
            await session.run()
        finally:
            # At our own end nobody is left to read a will, and every peer would look lost.
            session.carry_out_wills(execute=not self._stopping)
            session.return_leases()
            await _close(writer)

    def _admit(self) -> bool:
        # Counted in the moment it is decided, so that two handshakes cannot both take the last place.
        if self._connections >= self._max_connections:
            return False
        self._connections += 1
        return True

    def _refused(self, peer: _Peer, reason: str) -> None:
        # A hostile peer must not be able to fill the disk with log lines either.
        self._refusals += 1
        level = logging.WARNING if self._refusals <= _REFUSALS_SHOWN else logging.DEBUG
        _log.log(level, "coordinator %s: peer %s: %s", self.address, peer, reason)
        if self._refusals == _REFUSALS_SHOWN:
            _log.warning("coordinator %s: more refusals are logged at DEBUG only", self.address)


async def _close(writer: asyncio.StreamWriter) -> None:
    """Give the last reply a moment to leave, then cut the connection."""
    try:
        writer.close()
        async with asyncio.timeout(_CLOSE_SECONDS):
            await writer.wait_closed()
    except OSError:  # TimeoutError is one
        pass
    finally:
        writer.transport.abort()


async def _listen(host: str, port: int, *, beyond_loopback: bool) -> socket.socket:
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # The very address that is judged here is bound, so a name that resolves anew cannot make a difference.
    family, _, _, _, address = infos[0]
    if not beyond_loopback and not ipaddress.ip_address(address[0]).is_loopback:
        raise ValueError(
            f"the coordinator would listen on {address[0]}, beyond loopback, without a secret: "
            "give it one (--secret-file, or Secret.new()), or bind 127.0.0.1"
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _affordable(limits: Limits) -> tuple[int, int]:
    """Return how many pending and proved connections the open-file limit leaves room for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limits.max_pending, limits.max_connections
    usable = max(soft - _DESCRIPTORS_KEPT_FREE, 8)
    pending = min(limits.max_pending, usable // 4)
    connections = min(limits.max_connections, usable - pending)
    if connections < limits.max_connections:
        _log.info("room for %d connections: the open-file limit is %d (see `ulimit -n`)", connections, soft)
    return pending, connections
