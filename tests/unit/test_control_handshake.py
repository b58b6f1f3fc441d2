from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import threading
import time

import pytest

from argosy.control import handshake
from argosy.control.handshake import ClientHandshake, HandshakeError, NoRoomError, ServerHandshake
from argosy.control.secret import Secret

pytestmark = pytest.mark.timeout(20)


def test_bytes_are_as_documented() -> None:
    """An implementation written from the module's docstring alone agrees with ours on both sides."""
    secret = Secret.new()
    key = bytes.fromhex(secret.hex())
    client = ClientHandshake(secret)
    assert len(client.hello) == 40
    assert client.hello[:8] == b"ARGOSY\x00\x01"
    nonce = b"n" * 32
    transcript = client.hello + nonce + b"control"
    challenge = nonce + hmac.new(key, transcript + b" server", hashlib.sha256).digest()
    assert client.prove(challenge) == hmac.new(key, transcript + b" client", hashlib.sha256).digest()

    server = ServerHandshake(secret)
    hello = b"ARGOSY\x00\x01" + b"c" * 32
    challenge = server.challenge(hello)
    assert len(challenge) == 64
    transcript = hello + challenge[:32] + b"control"
    assert challenge[32:] == hmac.new(key, transcript + b" server", hashlib.sha256).digest()
    assert server.verify(hmac.new(key, transcript + b" client", hashlib.sha256).digest())


def test_nonces_are_fresh() -> None:
    secret = Secret.new()
    assert ClientHandshake(secret).hello != ClientHandshake(secret).hello
    hello = ClientHandshake(secret).hello
    assert ServerHandshake(secret).challenge(hello) != ServerHandshake(secret).challenge(hello)


def test_a_wrong_secret_fails_on_both_sides() -> None:
    client, server = ClientHandshake(Secret.new()), ServerHandshake(Secret.new())
    challenge = server.challenge(client.hello)
    with pytest.raises(HandshakeError, match="does not know this secret"):
        client.prove(challenge)
    assert not server.verify(bytes(32))
    assert not server.verify(b"")


def test_a_proof_of_another_purpose_fails() -> None:
    secret = Secret.new()
    client, server = ClientHandshake(secret, b"engine"), ServerHandshake(secret, b"control")
    with pytest.raises(HandshakeError):
        client.prove(server.challenge(client.hello))


def test_replay_fails() -> None:
    secret = Secret.new()
    client, server = ClientHandshake(secret), ServerHandshake(secret)
    challenge = server.challenge(client.hello)
    proof = client.prove(challenge)
    assert server.verify(proof)
    again = ServerHandshake(secret)
    again.challenge(client.hello)
    assert not again.verify(proof)
    with pytest.raises(HandshakeError):
        ClientHandshake(secret).prove(challenge)


def test_reflection_fails() -> None:
    secret = Secret.new()
    server = ServerHandshake(secret)
    challenge = server.challenge(ClientHandshake(secret).hello)
    assert not server.verify(challenge[32:])
    # Somebody who plays the server to a client, and has only that client's own words to offer.
    client = ClientHandshake(secret)
    with pytest.raises(HandshakeError):
        client.prove(client.hello[8:] + bytes(32))


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (b"", "does not speak"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".ljust(40), "does not speak"),
        (b"ARGOSY\x00\x01" + bytes(31), "does not speak"),
        (b"ARGOSY\x00\x02" + bytes(32), "version 2"),
    ],
)
def test_garbage_is_no_hello(hello: bytes, reason: str) -> None:
    with pytest.raises(HandshakeError, match=reason):
        ServerHandshake(Secret.new()).challenge(hello)


def test_verify_before_challenge_is_a_mistake() -> None:
    with pytest.raises(RuntimeError, match="after"):
        ServerHandshake(Secret.new()).verify(bytes(32))


def _over_sockets(ours: Secret, theirs: Secret, *, room: bool = True) -> list[BaseException | None]:
    ends = socket.socketpair()
    outcomes: list[BaseException | None] = [None, None]
    deadline = time.monotonic() + 5.0

    def attempt(index: int) -> None:
        try:
            if index == 0:
                handshake.connect_socket(ends[0], ours, deadline)
            else:
                handshake.accept_socket(ends[1], theirs, deadline, admit=lambda: room)
        except BaseException as error:
            outcomes[index] = error
        finally:
            ends[index].shutdown(socket.SHUT_WR)

    threads = [threading.Thread(target=attempt, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10.0)
    for end in ends:
        end.close()
    return outcomes


def test_socket_drivers() -> None:
    secret = Secret.new()
    assert _over_sockets(secret, secret) == [None, None]
    client, server = _over_sockets(secret, Secret.new())
    assert isinstance(client, HandshakeError)
    assert isinstance(server, ConnectionError)
    client, server = _over_sockets(secret, secret, room=False)
    assert isinstance(client, NoRoomError)
    assert isinstance(server, NoRoomError)


def test_a_silent_peer_ends_at_the_deadline() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            handshake.connect_socket(ours, Secret.new(), begin + 0.1)
        assert time.monotonic() - begin < 2.0


def test_a_dripping_peer_ends_at_the_deadline() -> None:
    """One byte now and then must not push the deadline out."""
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.02):
            theirs.send(b"x")

    with ours, theirs:
        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(TimeoutError):
            handshake.connect_socket(ours, Secret.new(), time.monotonic() + 0.2)
        stop.set()
        thread.join()


def test_asyncio_drivers() -> None:
    async def over_sockets(ours: Secret, theirs: Secret) -> list[BaseException | None]:
        ends = socket.socketpair()
        for end in ends:
            end.setblocking(False)

        async def connect() -> None:
            with ends[0]:
                await handshake.connect_async(ends[0], ours)

        async def accept() -> None:
            with ends[1]:
                await handshake.accept_async(ends[1], theirs)

        return await asyncio.gather(connect(), accept(), return_exceptions=True)

    secret = Secret.new()
    assert asyncio.run(over_sockets(secret, secret)) == [None, None]
    client, server = asyncio.run(over_sockets(secret, Secret.new()))
    assert isinstance(client, HandshakeError)
    assert isinstance(server, ConnectionError)
