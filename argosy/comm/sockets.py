"""The sockets between ranks on different hosts: made while a group joins, each one proved before a byte is decoded.

Of two ranks the lower one listens and the higher one connects, several times: socket 0 is for control, the last one for
messages between the two, those between for collectives. A connection begins with the handshake of
`argosy.control.handshake` (purpose `peer`), then the one who connected says what the connection is for:

    hello      28 bytes   nonce of the group (16), from rank (4), to rank (4), number of the socket (4); big-endian
    answer      1 byte    1 accepted, 0 refused

A listener lives as long as the join. Whoever else connects gets a few seconds and one of a bounded number of places,
and is dropped without anybody noticing. All of it runs in one event loop in a thread of its own, so that nobody who is
slow holds up another, while the caller's thread watches whether a peer has given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from argosy.comm.errors import CommError
from argosy.control.handshake import (
    ACCEPTED,
    PEER,
    REFUSED,
    HandshakeError,
    accept_async,
    connect_async,
    receive_async,
)
from argosy.control.secret import Secret

Address = tuple[str, int]

NONCE_BYTES: Final = 16
HELLO: Final = struct.Struct(f">{NONCE_BYTES}sIII")
GREETING_SECONDS: Final = 5.0
"""How long one connection may take to prove itself and say hello."""
MAX_STRANGERS: Final = 64
"""Connections, beyond those that are expected, that may be in the middle of it; the oldest makes room."""
_AT_ONCE: Final = 64
_BACKLOG: Final = 4096  # a queue that overflows costs those who wait in it seconds
_REFUSED_SECONDS: Final = 2.0
_PAUSE_SECONDS: Final = 0.05
_TICK_SECONDS: Final = 0.5


class JoinError(CommError):
    """A group that did not come together: which rank is to blame, and what to do.

    `echo` tells that the reason is most likely to be found in another worker.
    """

    def __init__(self, message: str, *, echo: bool = False) -> None:
        super().__init__(message)
        self.echo = echo


def open_secret(nonce: bytes) -> Secret:
    """What stands in for a secret on loopback, where none is needed: whoever can read the group's store has it."""
    return Secret(hashlib.sha256(b"argosy group on loopback" + nonce).digest())


def listen_at(address: str) -> socket.socket:
    """A listening socket at one address of this machine, at a port that is free."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.bind((address, 0))
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


class Introductions:
    """Makes the sockets of one rank to its peers on other hosts, `per_pair` to each.

    `call` has the addresses of the peers that this rank connects to; `expect` those that connect to `listener`.
    """

    def __init__(
        self,
        rank: int,
        nonce: bytes,
        secret: Secret,
        per_pair: int,
        *,
        call: dict[int, Address],
        expect: set[int],
        listener: socket.socket | None,
    ) -> None:
        self._rank, self._nonce, self._secret, self._per_pair = rank, nonce, secret, per_pair
        self._call, self._expect, self._listener = call, expect, listener
        self._made: dict[tuple[int, int], socket.socket] = {}
        self._wanted = per_pair * (len(call) + len(expect))
        self._trouble: dict[int, str] = {}
        self._pending: dict[asyncio.Task[Any], None] = {}

    def make(self, deadline: float, watch: Callable[[list[int]], None]) -> dict[int, list[socket.socket]]:
        """The sockets to each peer, not blocking, by their number; `deadline` is of `time.monotonic`.

        `watch` is called in this thread now and then with the ranks that are missing; it raises to give up.
        """
        failure: list[BaseException] = []
        started = threading.Event()

        def work() -> None:
            try:
                asyncio.run(self._run(deadline, started))
            except BaseException as error:
                failure.append(error)
            finally:
                started.set()

        thread = threading.Thread(target=work, name="argosy-join", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_TICK_SECONDS)
                if thread.is_alive():
                    watch(self.missing())
            if failure:
                raise self._reason(failure[0], deadline)
        except BaseException:
            started.wait()
            with contextlib.suppress(RuntimeError, AttributeError):  # the loop has ended by itself, or never begun
                self._loop.call_soon_threadsafe(self._task.cancel)
            thread.join()
            for sock in self._made.values():
                sock.close()
            raise
        return {
            peer: [self._made[peer, number] for number in range(self._per_pair)]
            for peer in sorted([*self._call, *self._expect])
        }

    def missing(self) -> list[int]:
        """The peers to which not all sockets are made."""
        peers = sorted([*self._call, *self._expect])
        return [peer for peer in peers if any((peer, number) not in self._made for number in range(self._per_pair))]

    def _reason(self, failure: BaseException, deadline: float) -> BaseException:
        """What to tell the user when the event loop has ended with an exception."""
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        if isinstance(failure, TimeoutError):
            peer = self.missing()[0]
            if peer in self._call:
                host, port = self._call[peer]
                why = self._trouble.get(peer, "no answer")
                return JoinError(
                    f"rank {self._rank} cannot reach rank {peer} at {host} port {port} ({why}): "
                    f"see that a firewall lets workers connect to each other",
                )
            return JoinError(f"rank {peer} has not connected to rank {self._rank} in time", echo=True)
        return failure

    async def _run(self, deadline: float, started: threading.Event) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._loop, self._task = asyncio.get_running_loop(), task
        self._complete, self._at_once = asyncio.Event(), asyncio.Semaphore(_AT_ONCE)
        started.set()
        async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)), asyncio.TaskGroup() as group:
            serving = group.create_task(self._serve(group))
            # Everybody begins with another peer, lest all queue up before the same one.
            for peer in sorted(self._call, key=lambda peer: (self._rank - peer) % (self._rank + 1)):
                for number in range(self._per_pair):
                    group.create_task(self._connect(peer, number))
            await self._complete.wait()
            serving.cancel()
            for stranger in self._pending:
                stranger.cancel()

    def _keep(self, peer: int, number: int, sock: socket.socket) -> None:
        # A peer that tries again has given up its first attempt, of which we may not know yet.
        if (old := self._made.pop((peer, number), None)) is not None:
            old.close()
        self._made[peer, number] = sock
        if len(self._made) == self._wanted:
            self._complete.set()

    async def _serve(self, group: asyncio.TaskGroup) -> None:
        if self._listener is None:
            return
        room = len(self._expect) * self._per_pair + MAX_STRANGERS
        while True:
            try:
                sock, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:
                self._check_descriptors(error)
                continue  # whoever it was has gone again
            if len(self._pending) >= room:
                oldest = next(iter(self._pending))
                oldest.cancel()
                self._pending.pop(oldest)
            visit = group.create_task(self._greet(sock))
            self._pending[visit] = None
            visit.add_done_callback(functools.partial(self._left, sock))
            await asyncio.sleep(0)  # accepting may not wait at all, and nobody else would have a turn

    def _left(self, sock: socket.socket, visit: asyncio.Task[bool]) -> None:
        # Not in the task itself: one that is cancelled before its first turn never gets to clean up.
        self._pending.pop(visit, None)
        if visit.cancelled() or visit.exception() is not None or not visit.result():
            sock.close()

    async def _greet(self, sock: socket.socket) -> bool:
        """Let whoever connected prove itself; tell whether the socket is one that was expected, and kept."""
        try:
            sock.setblocking(False)
            async with asyncio.timeout(GREETING_SECONDS):
                await accept_async(sock, self._secret, PEER)
                nonce, source, target, number = HELLO.unpack(await receive_async(sock, HELLO.size))
                mine = (nonce, target) == (self._nonce, self._rank)
                right = bool(mine and source in self._expect and number < self._per_pair)
                if right and (visit := asyncio.current_task()) is not None:
                    self._pending.pop(visit, None)  # no stranger: it is not to make room between answer and keeping
                await self._loop.sock_sendall(sock, ACCEPTED if right else REFUSED)
            if right:
                _tune(sock)
                self._keep(source, number, sock)
        except (OSError, HandshakeError, TimeoutError):
            return False  # a stranger; or a peer, which will try again or say itself why it cannot
        return right

    async def _connect(self, peer: int, number: int) -> None:
        """Connect to a peer, again and again until the deadline."""
        begin = time.monotonic()
        while True:
            try:
                async with self._at_once:
                    self._keep(peer, number, await self._attempt(peer, number))
                return
            except ConnectionRefusedError as error:
                # The port was open when the peer told it, so the peer has gone since.
                if time.monotonic() - begin > _REFUSED_SECONDS:
                    raise JoinError(f"rank {peer} has stopped listening while others joined", echo=True) from error
                self._trouble[peer] = str(error)
            except (OSError, TimeoutError) as error:
                self._check_descriptors(error)
                self._trouble[peer] = str(error) or "no answer"
            await asyncio.sleep(_PAUSE_SECONDS)

    def _check_descriptors(self, error: OSError) -> None:
        """Trying again is of no use when this process may not open another file."""
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise JoinError(
                f"rank {self._rank} has no file descriptors left for {self._wanted} sockets to its peers: "
                f"raise the limit (`ulimit -n`) or use fewer (sockets= in the strategy)"
            ) from error

    async def _attempt(self, peer: int, number: int) -> socket.socket:
        host, port = self._call[peer]
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            async with asyncio.timeout(GREETING_SECONDS):
                await self._loop.sock_connect(sock, (host, port))
                _tune(sock)
                await connect_async(sock, self._secret, PEER)
                await self._loop.sock_sendall(sock, HELLO.pack(self._nonce, self._rank, peer, number))
                answer = await receive_async(sock, len(ACCEPTED))
            if answer != ACCEPTED:
                raise JoinError(f"rank {peer} at {host} port {port} belongs to another group")
        except HandshakeError as error:
            sock.close()
            raise JoinError(
                f"rank {self._rank} and rank {peer} at {host} port {port} have different secrets ({error}): "
                f"give all workers of a job the same ARGOSY_SECRET"
            ) from error
        except BaseException:
            sock.close()
            raise
        return sock


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
