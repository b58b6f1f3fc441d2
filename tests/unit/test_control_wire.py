from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.control import wire
from argosy.control.wire import WireError

pytestmark = pytest.mark.timeout(60)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


async def _read_all(stream: bytes, max_bytes: int) -> list[wire.Message]:
    reader = asyncio.StreamReader()
    reader.feed_data(stream)
    reader.feed_eof()
    messages = []
    while (length := await wire.read_length(reader, max_bytes)) is not None:
        messages.append(await wire.read_body(reader, length))
    return messages


@given(st.lists(st.dictionaries(st.text(), JSON, max_size=4), max_size=4))
@settings(max_examples=100, deadline=None)
def test_round_trip(messages: list[wire.Message]) -> None:
    stream = b"".join(wire.encode(message) for message in messages)
    assert asyncio.run(_read_all(stream, wire.MAX_MESSAGE_BYTES)) == messages
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for message in messages:
            wire.send_message(ours, wire.encode(message), time.monotonic() + 5.0)
            assert wire.receive_message(theirs, time.monotonic() + 5.0) == message


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_messages_or_a_wire_error(stream: bytes) -> None:
    try:
        messages = asyncio.run(_read_all(stream, 100))
    except WireError:
        return
    assert all(isinstance(message, dict) for message in messages)


@given(st.binary(max_size=100) | st.text(alphabet='{}[]",:0123456789eE+-.\\u tfn', max_size=60).map(str.encode))
@settings(max_examples=500, deadline=None)
def test_any_body_is_an_object_or_a_wire_error(body: bytes) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(wire.decode(body), dict)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"1",
        b'"op"',
        b"null",
        b"{",
        b"{} {}",
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":"\xff"}',
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"a":' + b"9" * 10_000 + b"}",
    ],
)
def test_bodies_that_are_no_message(body: bytes) -> None:
    with pytest.raises(WireError):
        wire.decode(body)


def test_a_huge_length_costs_nothing() -> None:
    tracemalloc.start()
    try:
        for length in (wire.MAX_MESSAGE_BYTES + 1, 2**31, 2**32 - 1):
            with pytest.raises(WireError, match=f"{length} bytes was announced"):
                asyncio.run(_read_all(length.to_bytes(4, "big") + b"{}", wire.MAX_MESSAGE_BYTES))
            ours, theirs = socket.socketpair()
            with ours, theirs:
                ours.sendall(length.to_bytes(4, "big") + b"{}")
                with pytest.raises(WireError):
                    wire.receive_message(theirs, time.monotonic() + 5.0)
        assert tracemalloc.get_traced_memory()[1] < 2 * 2**20
    finally:
        tracemalloc.stop()


def test_a_large_message_is_not_sent() -> None:
    with pytest.raises(WireError, match="at most 16777216"):
        wire.encode({"value": "x" * wire.MAX_MESSAGE_BYTES})
    with pytest.raises(ValueError, match="JSON"):
        wire.encode({"value": float("nan")})


def test_ends_in_the_middle() -> None:
    frame = wire.encode({"op": "num_keys"})
    assert json.loads(frame[4:]) == {"op": "num_keys"}
    for cut in range(1, len(frame)):
        with pytest.raises(WireError, match="ended inside"):
            asyncio.run(_read_all(frame[:cut], 100))
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(frame[:-1])
        ours.close()
        with pytest.raises(ConnectionError):
            wire.receive_message(theirs, time.monotonic() + 5.0)


def test_a_deadline_that_passed_sends_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(TimeoutError):
            wire.send_message(ours, wire.encode({}), time.monotonic() - 1.0)
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)


def test_tuned_sockets_notice_a_lost_host() -> None:
    with socket.socket() as sock:
        wire.tune_socket(sock)
        options = {
            socket.TCP_NODELAY: 1,
            socket.TCP_KEEPIDLE: 5,
            socket.TCP_KEEPINTVL: 2,
            socket.TCP_KEEPCNT: 3,
            socket.TCP_USER_TIMEOUT: 11_000,
        }
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert {name: sock.getsockopt(socket.IPPROTO_TCP, name) for name in options} == options
