"""What bounds the coordinator: how many peers, how long they may take, how many bytes they may occupy.

Whatever its clients do, the coordinator's memory stays below about

    2 x max_stored_bytes + max_inflight_bytes + 0.5 MiB per connection

because the table counts what it stores and what is waited for, each connection has one request or one reply under way
at a time, and large ones take their bytes from one shared `ByteBudget` first. (The 0.5 MiB are what an asyncio stream
may buffer before it stops reading. To these comes what it takes to parse one message, one at a time, and what `leases`
keeps within bounds of its own: 64 ranges for a connection, 16,384 queues, whose names are the largest part of them.)
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from argosy.control.wire import MAX_MESSAGE_BYTES

SMALL_MESSAGE_BYTES: Final = 64 * 1024


@dataclass(frozen=True)
class Limits:
    """Bounds of one coordinator; the defaults suit jobs of up to a few thousand processes.

    >>> Limits(max_keys=0)
    Traceback (most recent call last):
        ...
    ValueError: Limits.max_keys must be more than 0, got 0
    """

    handshake_seconds: float = 5.0
    """How long a peer may take to prove itself."""
    message_seconds: float = 30.0
    """How long the rest of a message may take once its header came, or a reply to be taken."""
    max_pending: int = 1024
    """Connections that have not proved themselves yet; when full, the oldest of them is dropped."""
    max_connections: int = 4096
    """Connections that have proved themselves; when full, another one is told so and closed."""
    max_keys: int = 1_000_000
    """Keys stored at a time."""
    max_stored_bytes: int = 256 * 1024 * 1024
    """Bytes of keys, values and their bookkeeping stored at a time."""
    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Bytes of one message."""
    max_inflight_bytes: int = 256 * 1024 * 1024
    """Bytes of all large messages being received or sent at a time."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"Limits.{name} must be more than 0, got {value}")
        if self.max_inflight_bytes < self.max_message_bytes:
            raise ValueError(
                f"Limits.max_inflight_bytes ({self.max_inflight_bytes}) must hold one message of "
                f"Limits.max_message_bytes ({self.max_message_bytes})"
            )


class ByteBudget:
    """Bytes that large messages of all connections share; who finds none left waits, first come first served."""

    def __init__(self, total_bytes: int) -> None:
        self._free_bytes = total_bytes
        self._queue: collections.deque[tuple[int, asyncio.Future[None]]] = collections.deque()

    @asynccontextmanager
    async def hold(self, size_bytes: int) -> AsyncIterator[None]:
        """Occupy `size_bytes` inside the block; small messages pass without counting."""
        if size_bytes <= SMALL_MESSAGE_BYTES:
            yield
            return
        await self._take(size_bytes)
        try:
            yield
        finally:
            self._free_bytes += size_bytes
            self._serve()

    async def _take(self, size_bytes: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((size_bytes, turn))
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._free_bytes += size_bytes  # granted in the same moment: give it back
            else:
                turn.cancel()
            self._serve()
            raise

    def _serve(self) -> None:
        while self._queue:
            size_bytes, turn = self._queue[0]
            if turn.cancelled():
                self._queue.popleft()
            elif size_bytes <= self._free_bytes:
                self._queue.popleft()
                self._free_bytes -= size_bytes
                turn.set_result(None)
            else:
                return
