"""What the tests of `argosy.control` share: a coordinator in a thread, raw peers, and a bystander.

A bystander is a well-behaved client that works all through a test. An attack passes only if the bystander did not
notice it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from argosy.control import wire
from argosy.control.client import Client, parse_address
from argosy.control.coordinator import Coordinator
from argosy.control.handshake import connect_socket
from argosy.control.limits import Limits
from argosy.control.secret import Secret

T = TypeVar("T")


class Harbour:
    """A coordinator that runs in a thread of its own, and ways to reach it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coordinator: Coordinator) -> None:
        self._loop = loop
        self.coordinator = coordinator
        self.address = coordinator.address
        self.secret = coordinator.secret

    def client(self, who: str = "", timeout_seconds: float = 10.0) -> Client:
        return Client(self.address, self.secret, who=who, timeout_seconds=timeout_seconds, connect_seconds=5.0)

    def raw(self) -> socket.socket:
        """A connected socket that has proved nothing."""
        return socket.create_connection(parse_address(self.address), timeout=5.0)

    def member(self) -> socket.socket:
        """A connected socket that has passed the handshake."""
        sock = self.raw()
        connect_socket(sock, self.secret, time.monotonic() + 5.0)
        sock.settimeout(5.0)
        return sock

    def ask(self, question: Callable[[], T]) -> T:
        """Evaluate something inside the coordinator's event loop."""

        async def answer() -> T:
            return question()

        return self.run(answer())

    def run(self, work: Awaitable[T]) -> T:
        async def awaited() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result(timeout=10.0)

    def connections(self) -> int:
        return self.ask(lambda: self.coordinator._connections)


@contextmanager
def harbour(limits: Limits | None = None, secret: Secret | None = None, port: int = 0) -> Iterator[Harbour]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    started = Coordinator.start(secret, port=port, limits=limits or Limits())
    coordinator = asyncio.run_coroutine_threadsafe(started, loop).result(timeout=10.0)
    try:
        yield Harbour(loop, coordinator)
    finally:
        asyncio.run_coroutine_threadsafe(coordinator.stop(), loop).result(timeout=10.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=10.0)
        loop.close()


@contextmanager
def bystander(at: Harbour, slowest_seconds: float = 2.0) -> Iterator[None]:
    """A client that counts on and on; the block fails if a call of it fails or is slow."""
    stop, trouble, calls = threading.Event(), [], []

    def work() -> None:
        try:
            with at.client(who="bystander") as client:
                while not stop.is_set():
                    begin = time.monotonic()
                    calls.append(client.add("bystander", 1))
                    assert client.get("bystander") == b"%d" % calls[-1]
                    assert time.monotonic() - begin < slowest_seconds
                    stop.wait(0.002)
        except BaseException as error:
            trouble.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    eventually(lambda: bool(calls or trouble))
    before = len(calls)
    try:
        yield
        eventually(lambda: len(calls) > before + 2 or bool(trouble))
    finally:
        stop.set()
        thread.join(timeout=10.0)
    assert not trouble, trouble
    assert calls == list(range(1, len(calls) + 1))


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def read_until_closed(sock: socket.socket, seconds: float = 5.0) -> bytes:
    """All that the peer still sends; fails if it does not close in time."""
    received = bytearray()
    sock.settimeout(seconds)
    try:
        while chunk := sock.recv(65536):
            received += chunk
    except ConnectionResetError:
        pass
    return bytes(received)


def request(sock: socket.socket, message: dict[str, object]) -> wire.Message:
    sock.sendall(wire.encode(message))
    return wire.receive_message(sock, time.monotonic() + 5.0)
