"""Mutual proof of the job's secret, in four messages of fixed size.

Everything that listens or connects in Argosy starts with this exchange, before it decodes a single message. The
classes here do no input or output: they turn received bytes into bytes to send, so threads, event loops, the native
engine and the tests all speak exactly the same bytes. Thin drivers for blocking sockets and for asyncio are at the
end; asyncio's streams are made from the socket when the handshake is over (`asyncio.open_connection(sock=...)`).

Byte layout (integers big-endian, no padding, nothing variable):

    client -> server   hello      40 bytes   magic "ARGOSY" (6), version (2), client nonce (32)
    server -> client   challenge  64 bytes   server nonce (32), server proof (32)
    client -> server   proof      32 bytes   client proof
    server -> client   verdict     1 byte    1 accepted, 0 refused, 2 no room

    server proof = HMAC-SHA256(secret, hello | server nonce | purpose | " server")
    client proof = HMAC-SHA256(secret, hello | server nonce | purpose | " client")

`purpose` is ASCII and says what the connection is for (`control` for the coordinator, `peer` between workers, `table`
to a parameter server), so a proof given on one kind of connection is worth nothing on another.

[Note: replay and reflection]
Replay: a recorded hello and proof are worthless, because each server draws a fresh nonce for each connection and
the proof covers it; the same holds for a recorded challenge, which covers the client's fresh nonce. Reflection: an
attacker may ask a peer for proofs over nonces of his choice, by playing the client to a server, and hand them back
to it. All he gets that way are proofs that end in " server", and nobody accepts one of those from a client. The
server proves itself first, so a client never sends anything that depends on the secret to a server that does not
know it, and a wrong secret is noticed by the client, which can say so to its user.

What this does not give: the messages that follow are neither encrypted nor signed. Somebody who can rewrite packets
between two hosts of the job can still do so. On a network where that is a concern, run the job inside a VPN.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import time
from collections.abc import Callable
from typing import Final

from argosy.control.secret import Secret

MAGIC: Final = b"ARGOSY"
VERSION: Final = 1
PREAMBLE: Final = MAGIC + VERSION.to_bytes(2, "big")
NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
HELLO_BYTES: Final = len(PREAMBLE) + NONCE_BYTES
CHALLENGE_BYTES: Final = NONCE_BYTES + PROOF_BYTES
VERDICT_BYTES: Final = 1

REFUSED: Final = b"\x00"
ACCEPTED: Final = b"\x01"
NO_ROOM: Final = b"\x02"

CONTROL: Final = b"control"
PEER: Final = b"peer"
TABLE: Final = b"table"


class HandshakeError(Exception):
    """The other side did not prove that it knows the secret; trying again cannot help."""


class NoRoomError(ConnectionError):
    """The other side knows the secret, and has as many connections as it may; trying later can help."""


class ClientHandshake:
    """The side that connects: `hello`, then `prove`, then `conclude`.

    >>> secret = Secret.new()
    >>> client, server = ClientHandshake(secret), ServerHandshake(secret)
    >>> proof = client.prove(server.challenge(client.hello))
    >>> server.verify(proof)
    True
    """

    def __init__(self, secret: Secret, purpose: bytes = CONTROL) -> None:
        self._secret = secret
        self._purpose = purpose
        self.hello: Final = PREAMBLE + secrets.token_bytes(NONCE_BYTES)

    def prove(self, challenge: bytes) -> bytes:
        """Check the server's proof and return ours; raise `HandshakeError` if the server's is wrong."""
        if len(challenge) != CHALLENGE_BYTES:
            raise HandshakeError(f"a challenge has {CHALLENGE_BYTES} bytes, got {len(challenge)}")
        transcript = self.hello + challenge[:NONCE_BYTES] + self._purpose
        if not hmac.compare_digest(challenge[NONCE_BYTES:], self._secret.hmac(transcript + b" server")):
            raise HandshakeError("the server does not know this secret")
        return self._secret.hmac(transcript + b" client")

    def conclude(self, verdict: bytes) -> None:
        """Return if the server took us in, raise otherwise."""
        if verdict == NO_ROOM:
            raise NoRoomError("the server has no room for another connection")
        if verdict != ACCEPTED:
            raise HandshakeError("the server refused our proof of the secret")


class ServerHandshake:
    """The side that listens: `challenge`, then `verify`; the verdict byte is the caller's to send."""

    def __init__(self, secret: Secret, purpose: bytes = CONTROL) -> None:
        self._secret = secret
        self._purpose = purpose
        self._transcript = b""

    def challenge(self, hello: bytes) -> bytes:
        """Answer a hello with a fresh nonce and our proof; raise `HandshakeError` if it is no hello."""
        if len(hello) != HELLO_BYTES or not hello.startswith(MAGIC):
            raise HandshakeError("the client does not speak this protocol")
        if not hello.startswith(PREAMBLE):
            version = int.from_bytes(hello[len(MAGIC) : len(PREAMBLE)], "big")
            raise HandshakeError(f"the client speaks version {version} of the handshake, we speak {VERSION}")
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._transcript = hello + nonce + self._purpose
        return nonce + self._secret.hmac(self._transcript + b" server")

    def verify(self, proof: bytes) -> bool:
        """Tell whether the client's proof holds, in constant time."""
        if not self._transcript:
            raise RuntimeError("verify() comes after challenge()")
        return hmac.compare_digest(proof, self._secret.hmac(self._transcript + b" client"))


def always() -> bool:
    """Admit everybody who knows the secret; the default of the server drivers."""
    return True


def _verdict(holds: bool, admit: Callable[[], bool]) -> bytes:
    # Only who proved the secret may learn whether there is room.
    if not holds:
        return REFUSED
    return ACCEPTED if admit() else NO_ROOM


def _require_accepted(verdict: bytes) -> None:
    if verdict == REFUSED:
        raise HandshakeError("the client does not know this secret")
    if verdict == NO_ROOM:
        raise NoRoomError("no room for another connection")


def receive_exactly(sock: socket.socket, size_bytes: int, deadline: float) -> bytes:
    """Receive `size_bytes` bytes before `deadline` (of `time.monotonic`), or raise an `OSError`."""
    received = bytearray()
    while len(received) < size_bytes:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError("the peer did not answer in time")
        sock.settimeout(remaining)
        chunk = sock.recv(min(size_bytes - len(received), 1 << 18))
        if not chunk:
            raise ConnectionResetError("the peer closed the connection")
        received += chunk
    return bytes(received)


def connect_socket(sock: socket.socket, secret: Secret, deadline: float, purpose: bytes = CONTROL) -> None:
    """Prove ourselves over a connected blocking socket, as the side that connected."""
    handshake = ClientHandshake(secret, purpose)
    sock.settimeout(max(deadline - time.monotonic(), 0.001))
    sock.sendall(handshake.hello)
    sock.sendall(handshake.prove(receive_exactly(sock, CHALLENGE_BYTES, deadline)))
    handshake.conclude(receive_exactly(sock, VERDICT_BYTES, deadline))


def accept_socket(
    sock: socket.socket,
    secret: Secret,
    deadline: float,
    purpose: bytes = CONTROL,
    admit: Callable[[], bool] = always,
) -> None:
    """Let the peer of an accepted blocking socket prove itself; `admit` says whether there is room."""
    handshake = ServerHandshake(secret, purpose)
    hello = receive_exactly(sock, HELLO_BYTES, deadline)
    sock.sendall(handshake.challenge(hello))
    verdict = _verdict(handshake.verify(receive_exactly(sock, PROOF_BYTES, deadline)), admit)
    sock.sendall(verdict)
    _require_accepted(verdict)


async def connect_async(sock: socket.socket, secret: Secret, purpose: bytes = CONTROL) -> None:
    """Prove ourselves over a connected non-blocking socket in the event loop; the caller sets the deadline."""
    loop = asyncio.get_running_loop()
    handshake = ClientHandshake(secret, purpose)
    await loop.sock_sendall(sock, handshake.hello)
    await loop.sock_sendall(sock, handshake.prove(await receive_async(sock, CHALLENGE_BYTES)))
    handshake.conclude(await receive_async(sock, VERDICT_BYTES))


async def accept_async(
    sock: socket.socket, secret: Secret, purpose: bytes = CONTROL, admit: Callable[[], bool] = always
) -> None:
    """Let the peer of an accepted non-blocking socket prove itself; the caller sets the deadline."""
    loop = asyncio.get_running_loop()
    handshake = ServerHandshake(secret, purpose)
    hello = await receive_async(sock, HELLO_BYTES)
    await loop.sock_sendall(sock, handshake.challenge(hello))
    verdict = _verdict(handshake.verify(await receive_async(sock, PROOF_BYTES)), admit)
    await loop.sock_sendall(sock, verdict)
    _require_accepted(verdict)


async def receive_async(sock: socket.socket, size_bytes: int) -> bytes:
    """Receive `size_bytes` bytes over a non-blocking socket in the event loop; the caller sets the deadline."""
    # Never a byte more than asked for: a stream would buffer whatever an unproved peer cares to send.
    loop = asyncio.get_running_loop()
    received = b""
    while len(received) < size_bytes:
        chunk = await loop.sock_recv(sock, size_bytes - len(received))
        if not chunk:
            raise ConnectionResetError("the peer closed the connection")
        received += chunk
    return received
