"""A server's door: it listens, lets peers prove the job's secret, and hands those who did over to the tables.

A connection begins with the handshake of `argosy.control.handshake` (purpose `table`), then the one who connected says
what it is for:

    hello      12 bytes   number of the server (4), of the client (4), of the lane (4); big-endian
    answer      1 byte    1 accepted, 0 refused

Lane 0 is for pulls, lane 1 for pushes. Whoever does not get through this in a few seconds is dropped, and of those only
a bounded number may be in the middle of it at a time; nobody inside notices. After the answer the socket belongs to
native code, and no byte of it passes through Python.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import socket
import struct
from typing import Final, Protocol

from argosy.control.handshake import ACCEPTED, REFUSED, TABLE, HandshakeError, accept_async, receive_async
from argosy.control.secret import Secret

HELLO: Final = struct.Struct(">III")
PULLS, PUSHES = 0, 1
LANES: Final = (PULLS, PUSHES)
GREETING_SECONDS: Final = 5.0
MAX_STRANGERS: Final = 64
"""Connections, beyond those that are expected, that may be in the middle of it; the oldest makes room."""
_PAUSE_SECONDS: Final = 0.1
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Tables(Protocol):
    """Who takes proved connections over: `argosy._native.PsServer`."""

    def add_connection(self, fd: int, client: int, lane: int) -> None:
        """Serve a client's requests on a connected socket, which belongs to the tables from now on."""


class Door:
    """Lets the clients of one server in."""

    def __init__(self, listener: socket.socket, secret: Secret, number: int, workers: int, tables: Tables) -> None:
        self._listener, self._secret, self._number, self._workers = listener, secret, number, workers
        self._tables = tables
        self._pending: dict[asyncio.Task[bool], None] = {}
        self.refused = 0  # how many were not let in

    async def open(self) -> None:
        """Let clients in until it is cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    sock, _ = await loop.sock_accept(self._listener)
                except OSError as error:
                    await asyncio.sleep(_PAUSE_SECONDS if error.errno in _EXHAUSTED else 0)
                    continue  # whoever it was has gone again, or may come back
                if len(self._pending) >= self._workers * len(LANES) + MAX_STRANGERS:
                    oldest = next(iter(self._pending))
                    oldest.cancel()
                    self._pending.pop(oldest)
                visit = loop.create_task(self._greet(sock))
                self._pending[visit] = None
                visit.add_done_callback(functools.partial(self._left, sock))
                await asyncio.sleep(0)  # accepting may not wait at all, and nobody else would have a turn
        finally:
            for visit in list(self._pending):
                visit.cancel()

    def _left(self, sock: socket.socket, visit: asyncio.Task[bool]) -> None:
        # Not in the task itself: one that is cancelled before its first turn never gets to clean up.
        self._pending.pop(visit, None)
        if visit.cancelled() or visit.exception() is not None or not visit.result():
            self.refused += 1
        sock.close()  # of one that was handed over, nothing is left to close

    async def _greet(self, sock: socket.socket) -> bool:
        """Let whoever connected prove itself and say what it wants; whether it was let in."""
        try:
            sock.setblocking(False)
            async with asyncio.timeout(GREETING_SECONDS):
                await accept_async(sock, self._secret, TABLE)
                number, client, lane = HELLO.unpack(await receive_async(sock, HELLO.size))
                right = number == self._number and client < self._workers and lane in LANES
                if right and (visit := asyncio.current_task()) is not None:
                    self._pending.pop(
                        visit, None
                    )  # no stranger: it is not to make room between answer and handing over
                await asyncio.get_running_loop().sock_sendall(sock, ACCEPTED if right else REFUSED)
            if right:
                self._tables.add_connection(sock.fileno(), client, lane)  # it sets the options that it needs
                sock.detach()
        except (OSError, HandshakeError, TimeoutError):
            return False  # a stranger; or a worker, which will say itself why it cannot
        return bool(right)
