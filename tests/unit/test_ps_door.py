"""A server's door: who knows the secret and says what it wants is let in, and nobody else; nobody inside notices."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from control_harness import eventually

from argosy.comm.sockets import JoinError, listen_at
from argosy.control.handshake import CONTROL, TABLE, HandshakeError, connect_socket
from argosy.control.host import HostIdentity
from argosy.control.secret import Secret
from argosy.ps.card import ServerCard
from argosy.ps.door import HELLO, MAX_STRANGERS, PULLS, PUSHES, Door
from argosy.ps.joining import connect

HERE = HostIdentity.here(None)
WORKERS = 2


class Tables:
    """Stands in for the native server: it keeps the connections that it is given, and echoes one byte."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []
        self.socks: list[socket.socket] = []

    def add_connection(self, fd: int, client: int, lane: int) -> None:
        if client == 1 and lane == PUSHES:
            raise RuntimeError("the server was stopped")
        self.taken.append((client, lane))
        self.socks.append(socket.socket(fileno=os.dup(fd)))
        os.close(fd)
        self.socks[-1].setblocking(True)
        self.socks[-1].sendall(b"!")


class Server:
    """A door that is open in a thread of its own."""

    def __init__(self, door: Door, tables: Tables, port: int, secret: Secret) -> None:
        self.door, self.tables, self.port, self.secret = door, tables, port, secret
        self.card = ServerCard(0, "127.0.0.1", port, os.getpid(), "here", HERE)

    def join(self, client: int = 0, lane: int = PULLS, secret: Secret | None = None) -> socket.socket:
        return connect(self.card, secret or self.secret, client, lane, time.monotonic() + 5)

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10.0)

    def works(self) -> bool:
        with self.join() as sock:
            sock.settimeout(10.0)
            return sock.recv(1) == b"!"


@contextmanager
def server() -> Iterator[Server]:
    secret, tables = Secret.new(), Tables()
    with listen_at("127.0.0.1") as listener:
        door = Door(listener, secret, 0, WORKERS, tables)
        loop = asyncio.new_event_loop()
        opened = loop.create_task(door.open())
        thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([opened])))
        thread.start()
        try:
            yield Server(door, tables, listener.getsockname()[1], secret)
        finally:
            loop.call_soon_threadsafe(opened.cancel)
            thread.join(timeout=10.0)
            loop.close()
            for sock in tables.socks:
                sock.close()


def closed(sock: socket.socket) -> bool:
    sock.settimeout(10.0)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_worker_is_handed_over_by_its_number_and_lane() -> None:
    with server() as at:
        for client, lane in [(0, PULLS), (1, PULLS), (0, PUSHES)]:
            with at.join(client, lane) as sock:
                assert sock.recv(1) == b"!"
        assert at.tables.taken == [(0, PULLS), (1, PULLS), (0, PUSHES)]
        assert at.door.refused == 0


def test_a_wrong_secret_is_told_to_the_client_and_the_server_goes_on() -> None:
    with server() as at:
        with pytest.raises(
            JoinError, match=r"rank 0 and server 0 on here at 127\.0\.0\.1 port \d+ have different secrets"
        ):
            at.join(secret=Secret.new())
        assert at.works()
        eventually(lambda: at.door.refused == 1)


@pytest.mark.parametrize(("number", "client", "lane"), [(1, 0, 0), (0, WORKERS, 0), (0, 0, 2), (0, 2**32 - 1, 0)])
def test_who_wants_what_is_not_there_is_refused(number: int, client: int, lane: int) -> None:
    with server() as at:
        with at.raw() as sock:
            connect_socket(sock, at.secret, time.monotonic() + 5, TABLE)
            sock.sendall(HELLO.pack(number, client, lane))
            assert sock.recv(1) == b"\x00"
            assert closed(sock)
        with pytest.raises(JoinError, match="does not take rank 7 in"):
            at.join(client=7)
        assert at.works()


def test_a_proof_for_the_coordinator_is_worth_nothing_here() -> None:
    with server() as at:
        with at.raw() as sock, pytest.raises(HandshakeError):
            connect_socket(sock, at.secret, time.monotonic() + 5, CONTROL)
        assert at.works()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n" * 4, b"\x00" * 40, b"ARGOSY\x00\x63" + b"x" * 32])
def test_strangers_are_dropped(sent: bytes) -> None:
    with server() as at:
        with at.raw() as sock:
            sock.sendall(sent)
            with suppress(OSError):  # it may have been dropped already
                sock.shutdown(socket.SHUT_WR)
            assert closed(sock)
        assert at.works()


def test_a_crowd_that_says_nothing_makes_room() -> None:
    with server() as at:
        crowd = [at.raw() for _ in range(2 * MAX_STRANGERS)]
        assert at.works()
        assert closed(crowd[0])
        for sock in crowd:
            sock.close()


def test_a_server_that_cannot_take_a_connection_lets_the_next_one_in() -> None:
    with server() as at:
        with at.join(1, PUSHES) as sock:  # the stand-in refuses this one
            assert closed(sock)
        assert at.works()
        eventually(lambda: at.door.refused == 1)


def test_a_server_that_has_gone_is_named() -> None:
    with server() as at:
        card = at.card
    with pytest.raises(JoinError, match=r"^server 0 on here at 127\.0\.0\.1 port \d+ is gone") as caught:
        connect(card, Secret.new(), 0, PULLS, time.monotonic() + 5)
    assert caught.value.echo


GOOD = ServerCard(0, "127.0.0.1", 7000, 1, "here", HERE).to_json()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        GOOD.replace(b'"number": 0', b'"number": 1'),
        GOOD.replace(b"7000", b"0"),
        GOOD.replace(b"7000", b'"7000"'),
        GOOD.replace(b"127.0.0.1", b"example.org"),
        GOOD.replace(b'"here"', b"17"),
        GOOD.replace(b'"here"', b'"' + b"x" * 300 + b'"'),
        GOOD + b" " * 5000,
    ],
)
def test_a_card_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises((ValueError, TypeError)):
        ServerCard.parse(0, data)
