"""Messages of the control connection: a 4-byte big-endian length, then that many bytes of one JSON object.

JSON because nothing in it can be executed and anybody can read a capture of it. A length is checked against a cap
before a byte of the body is read or room for it is made, so that a hostile length costs nothing. Only peers that
passed the `handshake` get this far.

The blocking forms are for the client, the asyncio ones for the coordinator; both share `encode` and `decode`. How a
control socket is set up (keep-alive, no delay) is here too, because both ends need the same.
"""

from __future__ import annotations

import asyncio
import binascii
import json
import socket
import time
from collections.abc import Mapping
from typing import Final, NoReturn

from argosy.control.handshake import receive_exactly

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024
HEADER_BYTES: Final = 4

MAX_WAIT_SECONDS: Final = 1e6
"""Longest wait that can be asked for, 11 days; a socket's timeout has its limit not far beyond."""

KEEPALIVE_IDLE_SECONDS: Final = 5
KEEPALIVE_INTERVAL_SECONDS: Final = 2
KEEPALIVE_COUNT: Final = 3

Message = dict[str, object]


class WireError(Exception):
    """The bytes received are not a message; the connection cannot be used any further."""


def encode(message: Mapping[str, object], max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Return the frame for a message; raise `WireError` if it would be longer than `max_bytes`.

    >>> encode({"op": "num_keys"})
    b'\\x00\\x00\\x00\\x11{"op":"num_keys"}'
    """
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode("ascii")
    if len(body) > max_bytes:
        raise WireError(f"a message of {len(body)} bytes; at most {max_bytes} are allowed")
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def body_bytes(header: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> int:
    """Return the length that a header announces; raise `WireError` if it is more than `max_bytes`."""
    length = int.from_bytes(header, "big")
    if length > max_bytes:
        raise WireError(f"a message of {length} bytes was announced; at most {max_bytes} are allowed")
    return length


def decode(body: bytes) -> Message:
    """Return the message in a frame's body; raise `WireError` for anything but one JSON object.

    >>> decode(b'{"op":"num_keys"}')
    {'op': 'num_keys'}
    """
    try:
        message = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        # The body is not quoted: it may hold a user's data.
        raise WireError(f"a message that is not JSON ({type(error).__name__})") from None
    if not isinstance(message, dict):
        raise WireError(f"a message must be a JSON object, got {type(message).__name__}")
    return message


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def pack(value: bytes) -> str:
    """Return bytes as text for a message (base64)."""
    return binascii.b2a_base64(value, newline=False).decode("ascii")


def unpack(text: object) -> bytes:
    """Return the bytes that `pack` made text of; raise `ValueError` for anything else.

    >>> unpack(pack(b"ahoy"))
    b'ahoy'
    """
    if not isinstance(text, str):
        raise ValueError(f"base64 text expected, got {type(text).__name__}")
    return binascii.a2b_base64(text, strict_mode=True)


def send_message(sock: socket.socket, frame: bytes, deadline: float) -> None:
    """Send a frame over a blocking socket before `deadline` (of `time.monotonic`)."""
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("the deadline passed before the message was sent")
    sock.settimeout(remaining)  # `sendall` takes it as the limit for the whole frame
    sock.sendall(frame)


def receive_message(sock: socket.socket, deadline: float, max_bytes: int = MAX_MESSAGE_BYTES) -> Message:
    """Receive a message from a blocking socket before `deadline` (of `time.monotonic`)."""
    length = body_bytes(receive_exactly(sock, HEADER_BYTES, deadline), max_bytes)
    return decode(receive_exactly(sock, length, deadline))


async def read_length(reader: asyncio.StreamReader, max_bytes: int = MAX_MESSAGE_BYTES) -> int | None:
    """Read a header and return the length of the body, or None if the peer closed between messages."""
    try:
        return body_bytes(await reader.readexactly(HEADER_BYTES), max_bytes)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise WireError("the connection ended inside a header") from None
        return None


async def read_body(reader: asyncio.StreamReader, length: int) -> Message:
    """Read the body that a header announced; the buffer grows as bytes arrive, not before."""
    try:
        return decode(await reader.readexactly(length))
    except asyncio.IncompleteReadError:
        raise WireError("the connection ended inside a message") from None


def tune_socket(sock: socket.socket) -> None:
    """Send small messages at once, and notice within about 11 s that the other host is gone."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
    # Keep-alive is silent while sent bytes wait for their acknowledgement; then this limit counts.
    gone_seconds = KEEPALIVE_IDLE_SECONDS + KEEPALIVE_INTERVAL_SECONDS * KEEPALIVE_COUNT
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * gone_seconds)
