"""The client against servers that are absent, late, silent, false or dead, and across a fork."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from control_harness import harbour
from launching import free_port

from argosy.control.client import (
    Client,
    CoordinatorLost,
    CoordinatorUnreachable,
    DeadlineExceeded,
    parse_address,
)
from argosy.control.handshake import HELLO_BYTES, HandshakeError, accept_socket, receive_exactly
from argosy.control.secret import Secret

pytestmark = pytest.mark.timeout(30)


@contextmanager
def server(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server of another make; `behave` gets each connection in turn."""
    listener = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            accepted.append(sock)
            sock.settimeout(5.0)
            try:
                behave(sock)
            except (OSError, HandshakeError):
                continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(timeout=10.0)
        for sock in accepted:
            sock.close()


@pytest.mark.parametrize("address", ["", "host", ":1", "host:", "host:0", "host:65536", "host:-1", "host:x"])
def test_addresses(address: str) -> None:
    with pytest.raises(ValueError, match="an address is host:port"):
        parse_address(address)


def test_nobody_there_is_said_clearly() -> None:
    address = f"127.0.0.1:{free_port()}"
    begin = time.monotonic()
    with pytest.raises(CoordinatorUnreachable) as caught:
        Client(address, Secret.new(), connect_seconds=0.3).num_keys()
    assert time.monotonic() - begin < 2.0
    assert f"no coordinator at {address} after 0.3 s" in str(caught.value)
    assert "check that the launcher runs" in str(caught.value)
    assert isinstance(caught.value, ConnectionError)


def test_a_late_coordinator_is_waited_for() -> None:
    port, secret = free_port(), Secret.new()
    began = threading.Event()

    def attempt() -> int:
        began.set()
        with Client(f"127.0.0.1:{port}", secret, connect_seconds=10.0) as client:
            return client.add("n", 7)

    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(attempt()))
    thread.start()
    began.wait()
    time.sleep(0.15)
    with harbour(secret=secret, port=port):
        thread.join(timeout=10.0)
    assert results == [7]


def test_close_ends_the_attempts_to_connect() -> None:
    client = Client(f"127.0.0.1:{free_port()}", Secret.new(), connect_seconds=30.0)
    timer = threading.Timer(0.1, client.close)
    timer.start()
    begin = time.monotonic()
    with pytest.raises(CoordinatorLost, match="closed"):
        client.num_keys()
    assert time.monotonic() - begin < 5.0


def test_a_server_that_does_not_know_the_secret_learns_nothing() -> None:
    received: list[bytes] = []

    def pretend(sock: socket.socket) -> None:
        received.append(receive_exactly(sock, HELLO_BYTES, time.monotonic() + 5.0))
        sock.sendall(os.urandom(64) + b"\x01")
        while chunk := sock.recv(65536):
            received.append(chunk)

    secret = Secret.new()
    with server(pretend) as address, Client(address, secret, connect_seconds=5.0) as client:
        with pytest.raises(HandshakeError, match="check --secret-file / ARGOSY_SECRET"):
            client.set("password", b"hunter2")
        with pytest.raises(HandshakeError):
            client.will("password", b"hunter2")
    assert all(len(chunk) == HELLO_BYTES for chunk in received)


def test_a_server_that_hangs_up_during_the_handshake_is_tried_again() -> None:
    calls: list[float] = []

    def hang_up(sock: socket.socket) -> None:
        calls.append(time.monotonic())
        sock.close()

    with server(hang_up) as address, pytest.raises(CoordinatorUnreachable, match="no coordinator at"):
        Client(address, Secret.new(), connect_seconds=0.3).num_keys()
    assert len(calls) > 1


def test_a_silent_server_holds_nobody_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("argosy.control.client._GRACE_SECONDS", 0.1)
    secret = Secret.new()
    with server(lambda sock: None) as address, pytest.raises(CoordinatorUnreachable):
        Client(address, secret, connect_seconds=0.2).num_keys()

    def only_shake(sock: socket.socket) -> None:
        accept_socket(sock, secret, time.monotonic() + 5.0)

    with server(only_shake) as address, Client(address, secret, timeout_seconds=0.1) as client:
        with pytest.raises(CoordinatorLost, match=r"during set: no answer for 0.2 s"):
            client.set("k", b"v")
        with pytest.raises(CoordinatorLost, match=r"during get: no answer for 0.15 s"):
            client.get("k", timeout_seconds=0.05)


@pytest.mark.parametrize(
    "reply",
    [
        b"\x7f\xff\xff\xff",
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x02{}",
        b'\x00\x00\x00\x0b{"value":1}',
        b'\x00\x00\x00\x0d{"value":"!"}',
        b"\x00\x00",
    ],
)
def test_a_server_that_answers_nonsense_is_lost(reply: bytes) -> None:
    secret = Secret.new()

    def babble(sock: socket.socket) -> None:
        accept_socket(sock, secret, time.monotonic() + 5.0)
        sock.recv(65536)
        sock.sendall(reply)
        sock.close()

    with server(babble) as address, Client(address, secret) as client, pytest.raises(CoordinatorLost):
        client.get("k")


def test_an_endless_timeout_is_bounded() -> None:
    with harbour() as at, at.client() as client:
        client.set("k", b"v")
        assert client.get("k", timeout_seconds=float("inf")) == b"v"
        with pytest.raises(DeadlineExceeded):
            client.get("never", timeout_seconds=-5.0)


FORK = """
import os, sys, threading, time
from argosy.control.client import Client
from argosy.control.secret import Secret

client = Client(sys.argv[1], Secret.from_hex(os.environ["TEST_SECRET"]), timeout_seconds=10.0)
client.set("k", b"v")
will = client.will("gone", b"gone")
answer = []
waiting = threading.Thread(target=lambda: answer.append(client.get("later")))
waiting.start()
while client.add("n", 1) < 20:
    pass
"""

FORK_AND_GO_ON = """
for use in (False, True):
    child = os.fork()
    if child == 0:
        ok = not use or (client.get("k") == b"v" and client.add("children", 1) == 1)
        client.close() if use else None
        os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
assert client.get("k") == b"v"
client.set("later", b"came")
waiting.join()
assert answer == [b"came"]
assert not client.check(["gone"])
will.withdraw()
client.close()
"""

FORK_AND_DIE = """
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


def _start(script: str, address: str, secret: Secret) -> subprocess.Popen[str]:
    environment = {**os.environ, "TEST_SECRET": secret.hex()}
    return subprocess.Popen([sys.executable, "-c", script, address], env=environment, text=True, stdout=subprocess.PIPE)


def test_a_forked_child_does_no_harm() -> None:
    with harbour() as at:
        process = _start(FORK + FORK_AND_GO_ON, at.address, at.secret)
        assert process.wait(timeout=20.0) == 0
        with at.client() as client:
            assert client.num_keys() == 4
        process.communicate()


def test_a_will_is_carried_out_though_a_forked_child_lives_on() -> None:
    with harbour() as at, at.client() as client:
        process = _start(FORK + FORK_AND_DIE, at.address, at.secret)
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert not client.check(["gone"])
            process.kill()
            assert client.get("gone", timeout_seconds=5.0) == b"gone"
        finally:
            process.kill()
            os.kill(child, signal.SIGKILL)
            process.communicate()
