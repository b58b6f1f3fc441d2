"""The blocking client of the coordinator, for workers, launchers and torch's `store`.

Thread-safe: a call takes an idle connection or opens another, so a `get` that waits does not hold up other threads.
Every wait ends: the coordinator answers at the deadline, and if it does not, the socket's own timeout does.

[Note: fork] A forked child (a DataLoader worker) inherits the descriptors. Were it to use them, its bytes and its
parent's would mix; were it to keep them open, the parent's death would not end the connection, and its will would not
be carried out. So the child closes its copies right after the fork, without shutting the connections down, and opens
its own if it ever calls.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Final

from argosy.control import wire
from argosy.control.handshake import HandshakeError, connect_socket
from argosy.control.secret import Secret

_GRACE_SECONDS: Final = 10.0
_ATTEMPT_SECONDS: Final = 10.0
_MAX_PAUSE_SECONDS: Final = 1.0
_MAX_IDLE: Final = 4


class CoordinatorError(RuntimeError):
    """The coordinator refused a request; `kind` says why in one word."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class DeadlineExceeded(TimeoutError):
    """A key or a barrier's last participant did not come in time."""


class CoordinatorLost(ConnectionError):
    """The connection ended during a call; whether the call had its effect is not known."""


class CoordinatorUnreachable(ConnectionError):
    """No connection could be made within `connect_seconds`."""


def parse_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `[host]:port`.

    >>> parse_address("127.0.0.1:29500"), parse_address("[::1]:29500")
    (('127.0.0.1', 29500), ('::1', 29500))
    """
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"an address is host:port, got {address!r}")
    return host, int(port)


class Will:
    """A key that the coordinator sets if this process goes without having called `withdraw`."""

    def __init__(self, client: Client, key: str, sock: socket.socket) -> None:
        self._client = client
        self._key = key
        self._sock: socket.socket | None = sock

    def withdraw(self) -> None:
        """Take the will back: the key will not be set. Calling it again does nothing."""
        sock, self._sock = self._sock, None
        if sock is not None:
            try:
                self._client._exchange(sock, {"op": "withdraw", "key": self._key}, 0.0)
            finally:
                self._client._drop(sock)
                self._client._wills.discard(self)

    def _abandon(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            self._client._drop(sock)


class Line:
    """A connection that is held open, for what the coordinator ties to one. Thread-safe, one call at a time."""

    def __init__(self, client: Client, sock: socket.socket) -> None:
        self._client, self._lock = client, threading.Lock()
        self._sock: socket.socket | None = sock

    def call(self, request: dict[str, object], timeout_seconds: float | None = None) -> wire.Message:
        """Make one request; those that wait do so for `timeout_seconds`, or as long as the client's calls do."""
        seconds = self._client._wait_seconds(timeout_seconds)
        with self._lock:
            if self._sock is None:
                raise CoordinatorLost(f"the connection was closed before {request['op']}")
            try:
                return self._client._exchange(self._sock, {**request, "timeout_seconds": seconds}, seconds)
            except (CoordinatorError, DeadlineExceeded):
                raise
            except BaseException:
                self._end()  # what is on its way would be taken for the next answer
                raise

    def close(self) -> None:
        """End the connection. Calling it again does nothing."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            self._client._drop(sock)


class Client:
    """A connection to the job's coordinator, made on first use.

    `who` names this process in the errors of barriers ("rank 3"). `timeout_seconds` holds for calls that give none.

    >>> import asyncio
    >>> from argosy.control.coordinator import Coordinator
    >>> def count(address: str, secret: Secret) -> int:
    ...     with Client(address, secret, who="rank 0") as client:
    ...         client.add("steps", 2)
    ...         return client.add("steps", 3)
    >>> async def example() -> int:
    ...     coordinator = await Coordinator.start(Secret.new())
    ...     total = await asyncio.to_thread(count, coordinator.address, coordinator.secret)
    ...     await coordinator.stop()
    ...     return total
    >>> asyncio.run(example())
    5
    """

    def __init__(
        self,
        address: str,
        secret: Secret,
        *,
        who: str = "",
        timeout_seconds: float = 300.0,
        connect_seconds: float = 30.0,
    ) -> None:
        self.address: Final = address
        self.who: Final = who
        self.timeout_seconds: Final = _bounded(timeout_seconds)
        self._where = parse_address(address)
        self._secret = secret
        self._connect_seconds = connect_seconds
        self._kept: list[object] = []
        self._reset()
        forget = weakref.WeakMethod(self._forget_parent)
        os.register_at_fork(after_in_child=lambda: (method := forget()) and method())

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._idle: list[socket.socket] = []
        self._open: set[socket.socket] = set()
        self._wills: set[Will] = set()

    def _forget_parent(self) -> None:
        # See [Note: fork]. A thread that held the lock does not exist in the child, so the lock is made anew.
        inherited, closed = self._open, self._closing.is_set()
        self._reset()
        if closed:
            self._closing.set()
        for sock in inherited:
            sock.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all connections; calls blocked in other threads raise `CoordinatorLost`."""
        self._closing.set()
        with self._lock:
            idle, self._idle = self._idle, []
            wills, self._wills = self._wills, set()
        for will in wills:
            will._abandon()
        for sock in idle:
            self._drop(sock)
        with self._lock:
            busy = list(self._open)
        for sock in busy:
            # Closing a descriptor does not wake the thread that reads from it; shutting it down does, and that
            # thread closes it then.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def keep(self, companion: object) -> None:
        """Keep an object alive for as long as this client is."""
        self._kept.append(companion)

    # The operations.

    def set(self, key: str, value: bytes) -> None:
        """Set a key and release those who wait for it."""
        self._call({"op": "set", "key": key, "value": wire.pack(value)})

    def get(self, key: str, timeout_seconds: float | None = None) -> bytes:
        """Return a key's value; wait for it if nobody has set it yet."""
        reply = self._call({"op": "get", "key": key}, self._wait_seconds(timeout_seconds))
        return _unpacked(reply.get("value"))

    def add(self, key: str, amount: int) -> int:
        """Add to an integer, 0 if the key is new, and return the sum."""
        return _int(self._call({"op": "add", "key": key, "amount": amount}))

    def append(self, key: str, value: bytes) -> None:
        """Append to a value, empty if the key is new."""
        self._call({"op": "append", "key": key, "value": wire.pack(value)})

    def wait(self, keys: Sequence[str], timeout_seconds: float | None = None) -> None:
        """Wait until each of the keys has been set."""
        self._call({"op": "wait", "keys": list(keys)}, self._wait_seconds(timeout_seconds))

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all the keys are there now."""
        return bool(self._call({"op": "check", "keys": list(keys)}).get("result"))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set `desired` if the value is `expected` (empty: if the key is new); return what then is the value."""
        values = {"expected": wire.pack(expected), "desired": wire.pack(desired)}
        return _unpacked(self._call({"op": "compare_set", "key": key, **values}).get("value"))

    def delete(self, key: str) -> bool:
        """Remove a key; tell whether it was there."""
        return bool(self._call({"op": "delete", "key": key}).get("result"))

    def num_keys(self) -> int:
        """Return how many keys the coordinator holds."""
        return _int(self._call({"op": "num_keys"}))

    def multi_get(self, keys: Sequence[str], timeout_seconds: float | None = None) -> list[bytes]:
        """Return the values of several keys in one round trip; wait for those not set yet."""
        reply = self._call({"op": "multi_get", "keys": list(keys)}, self._wait_seconds(timeout_seconds))
        values = reply.get("values")
        if not isinstance(values, list) or len(values) != len(keys):
            raise CoordinatorLost("the coordinator's reply does not have a value for each key")
        return [_unpacked(value) for value in values]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """Set several keys in one round trip."""
        self._call({"op": "multi_set", "keys": list(keys), "values": [wire.pack(value) for value in values]})

    def barrier(self, name: str, size: int, timeout_seconds: float | None = None) -> None:
        """Wait until `size` callers are at the barrier of that name; it can be used again at once."""
        request = {"op": "barrier", "name": name, "size": size, "who": self.who}
        self._call(request, self._wait_seconds(timeout_seconds))

    def will(self, key: str, value: bytes) -> Will:
        """Leave a last will: if this process goes without withdrawing it, the coordinator sets `key`, if absent.

        It has a connection of its own, held open until then. `close` without `withdraw` counts as going.
        """
        sock = self._connect()
        try:
            self._exchange(sock, {"op": "will", "key": key, "value": wire.pack(value)}, 0.0)
        except BaseException:
            self._drop(sock)
            raise
        will = Will(self, key, sock)
        with self._lock:
            self._wills.add(will)
        return will

    def line(self) -> Line:
        """A connection of its own, held open until it is closed or this process ends."""
        return Line(self, self._connect())

    # How a call is made.

    def _wait_seconds(self, timeout_seconds: float | None) -> float:
        return self.timeout_seconds if timeout_seconds is None else _bounded(timeout_seconds)

    def _call(self, request: dict[str, object], wait_seconds: float | None = None) -> wire.Message:
        if wait_seconds is not None:
            request["timeout_seconds"] = wait_seconds
        with self._lock:
            sock = self._idle.pop() if self._idle else None
        if sock is None:
            sock = self._connect()
        keep = False
        try:
            reply = self._exchange(sock, request, wait_seconds or 0.0)
            keep = True
            return reply
        except (CoordinatorError, DeadlineExceeded):
            keep = True  # an error, but an answer: the connection is as good as before
            raise
        finally:
            if not (keep and self._give_back(sock)):
                self._drop(sock)

    def _exchange(self, sock: socket.socket, request: dict[str, object], wait_seconds: float) -> wire.Message:
        """Send a request and return its reply; a socket that raised anything but a reply's error is unusable."""
        try:
            frame = wire.encode(request)
        except wire.WireError as error:
            raise CoordinatorError("too-large", f"{request['op']} is {error}") from None
        answer_seconds = (wait_seconds or self.timeout_seconds) + _GRACE_SECONDS
        deadline = time.monotonic() + answer_seconds
        try:
            wire.send_message(sock, frame, deadline)
            reply = wire.receive_message(sock, deadline)
        except (OSError, wire.WireError) as error:
            if self._closing.is_set():
                raise CoordinatorLost(f"the client was closed during {request['op']}") from None
            if isinstance(error, TimeoutError) and error.errno is None:  # ours, and not the network's ETIMEDOUT
                error = TimeoutError(f"no answer for {answer_seconds:g} s")
            raise CoordinatorLost(f"lost the coordinator at {self.address} during {request['op']}: {error}") from error
        kind = reply.get("error")
        if kind == "deadline":
            raise DeadlineExceeded(str(reply.get("message")))
        if kind is not None:
            raise CoordinatorError(str(kind), str(reply.get("message")))
        return reply

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + self._connect_seconds
        pause_seconds = 0.02
        while True:
            if self._closing.is_set():
                raise CoordinatorLost("the client is closed")
            try:
                return self._attempt(min(deadline, time.monotonic() + _ATTEMPT_SECONDS))
            except HandshakeError as error:
                raise HandshakeError(
                    f"the coordinator at {self.address} has another secret ({error}): "
                    "check --secret-file / ARGOSY_SECRET"
                ) from None
            except OSError as error:
                # Jitter keeps a thousand workers from knocking in step.
                pause = pause_seconds * random.uniform(0.5, 1.5)  # noqa: S311
                if time.monotonic() + pause >= deadline:
                    raise CoordinatorUnreachable(
                        f"no coordinator at {self.address} after {self._connect_seconds:g} s ({error}): "
                        "check that the launcher runs, and that this host can reach that address and port"
                    ) from error
            self._closing.wait(pause)
            pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS)

    def _attempt(self, deadline: float) -> socket.socket:
        sock = socket.create_connection(self._where, timeout=max(deadline - time.monotonic(), 0.001))
        try:
            with self._lock:
                self._open.add(sock)
            if self._closing.is_set():
                raise CoordinatorLost("the client is closed")
            wire.tune_socket(sock)
            connect_socket(sock, self._secret, deadline)
            return sock
        except BaseException:
            self._drop(sock)
            raise

    def _give_back(self, sock: socket.socket) -> bool:
        with self._lock:
            room = len(self._idle) < _MAX_IDLE and not self._closing.is_set() and sock in self._open
            if room:
                self._idle.append(sock)
            return room

    def _drop(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.discard(sock)
        sock.close()


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), wire.MAX_WAIT_SECONDS)


def _unpacked(value: object) -> bytes:
    try:
        return wire.unpack(value)
    except ValueError as error:
        raise CoordinatorLost(f"the coordinator's reply has no value: {error}") from None


def _int(reply: wire.Message) -> int:
    result = reply.get("result")
    if not isinstance(result, int):
        raise CoordinatorLost("the coordinator's reply has no result")
    return result
