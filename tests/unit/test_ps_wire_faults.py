"""The parameter server given what no client sends, and clients given what no server answers."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ps_harness import DEADLINE_SECONDS, KINDS, ask, at, config, eventually, head, job, reply

from argosy import _native

ONE_ID = struct.pack("<q", 0)
MALFORMED = [
    pytest.param(
        "unknown_table",
        "table 9 is unknown: there are 3",
        "pull_rows",
        ONE_ID,
        {"number": 9, "count": 1},
        id="pull of an unknown table",
    ),
    pytest.param(
        "unknown_table",
        "table 9 is unknown",
        "push_rows",
        b"\0" * 16,
        {"number": 9, "count": 1},
        id="push to an unknown table",
    ),
    pytest.param(
        "unknown_table",
        "range 3 is unknown: none",
        "pull_range",
        b"",
        {"number": 3, "count": 1},
        id="pull of an unknown range",
    ),
    pytest.param(
        "mismatch",
        "rows of 2 numbers, and the table's have 1",
        "pull_rows",
        ONE_ID,
        {"number": 3, "count": 1, "dim": 2},
        id="rows of another width",
    ),
    pytest.param(
        "malformed",
        "8 bytes does not fit",
        "pull_rows",
        ONE_ID,
        {"number": 3, "count": 2},
        id="a count that does not fit",
    ),
    pytest.param(
        "too_large",
        "count is",
        "push_rows",
        ONE_ID,
        {"number": 3, "count": 2**61, "dim": 16},
        id="a count that overflows",
    ),
    pytest.param(
        "too_large",
        "send it in parts",
        "push_rows",
        b"",
        {"number": 3, "count": 2**24, "dim": 2**14},
        id="rows of 1 TB",
    ),
    pytest.param(
        "too_large",
        "bytes are more than",
        "pull_rows",
        b"\0" * (8 << 20),
        {"number": 5, "count": 1 << 20, "dim": 65536},
        id="an answer of 1 TB",
    ),
    pytest.param(
        "malformed", "dim is 0", "pull_rows", ONE_ID, {"number": 3, "count": 1, "dim": 0}, id="rows of no numbers"
    ),
    pytest.param("malformed", "kind 77 is unknown", 77, b"abc", {}, id="an unknown kind"),
    pytest.param("malformed", "kind 0 is unknown", 0, b"", {}, id="kind 0"),
    pytest.param(
        "malformed", "no known type", "pull_rows", ONE_ID, {"number": 3, "count": 1, "values": 3}, id="unknown values"
    ),
    pytest.param("mismatch", "connection of client 0", "done", b"", {"client": 1}, id="another client"),
    pytest.param("malformed", "does not fit", "create_table", b"\0" * 50, {}, id="a configuration cut short"),
    pytest.param("malformed", "dim", "create_table", b"\0" * 96, {}, id="a configuration of zeros"),
    pytest.param(
        "malformed",
        "CRC",
        "pull_rows",
        ONE_ID,
        {"number": 3, "count": 1, "payload_crc": 1},
        id="a payload that was changed",
    ),
    pytest.param("malformed", "weight", "done", b"", {"weight": float("nan")}, id="a weight that is no number"),
    pytest.param(
        "unmapped",
        "no memory",
        "pull_rows",
        b"",
        {"number": 3, "count": 1, "flags": 1},
        id="shared memory that was not attached",
    ),
    pytest.param(
        "unmapped", "not to be had", "attach", struct.pack("<QQQ16x", 2**30, 5, 1 << 20), {}, id="memory of no process"
    ),
]


@pytest.mark.parametrize(("wrong", "text", "kind", "payload", "fields"), MALFORMED)
def test_a_malformed_request_is_answered_and_the_connection_goes_on(
    wrong: str, text: str, kind: str | int, payload: bytes, fields: dict[str, Any]
) -> None:
    with job() as made:
        wire = made.wire()
        ask(wire, "create_table", config(1), number=3)
        ask(wire, "create_table", config(65536), number=5)
        answer = ask(wire, kind, payload, **fields)
        assert (answer.wrong, text in answer.text) == (wrong, True), answer
        pulled = ask(wire, "pull_rows", struct.pack("<q", 1), number=3, count=1, dim=1)
        assert (pulled.wrong, pulled.payload) == ("none", b"\0" * 4)
        assert made.servers[0].stats()["tables"][0]["rows"] == 0


@pytest.mark.parametrize("length", [2**31, 2**63, 2**64 - 1])
def test_a_huge_length_is_refused_before_memory_is_taken(length: int) -> None:
    with job() as made:
        wire = made.wire()
        wire.sendall(head("push_rows", length=length, count=1))
        answer = reply(wire)
        assert (answer.wrong, str(length) in answer.text) == ("too_large", True)
        assert wire.recv(1) == b""  # what follows cannot be told from a head
        assert made.servers[0].stats()["dropped_connections"] == 1
        assert ask(made.wire(), "stats").wrong == "none"


def test_another_version_is_told_so() -> None:
    with job() as made:
        wire = made.wire()
        answer = ask(wire, "stats", version=2)
        assert (answer.wrong, "install the same release" in answer.text, wire.recv(1)) == ("version", True, b"")


def test_shared_memory_beyond_its_end_is_refused() -> None:
    with job() as made:
        client = made.join(0, shared=True)  # it has told the server about its memory
        client.create_table(3, 1)
        heap_bytes = struct.unpack("<Q", attach_of_this_process()[16:24])[0]
        wire = made.wire()
        assert ask(wire, "attach", attach_of_this_process()).wrong == "none"
        for place in (heap_bytes, 2**64 - 8, 2**63, 3):
            for field in ("at", "answer_at"):
                answer = ask(wire, "pull_rows", number=3, count=1, dim=1, flags=1, **{field: place})
                assert (answer.wrong, "attached memory" in answer.text) == ("malformed", True), place
        assert ask(wire, "pull_rows", number=3, count=1, dim=1, flags=1, at=4096, answer_at=4096).wrong == "none"


def attach_of_this_process() -> bytes:
    """What a client of this process would send: its memfd, found by its name."""
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{fd}"
        try:
            if not os.readlink(path).startswith("/memfd:argosy"):
                continue
        except OSError:
            continue
        with open(path, "rb") as file:
            nonce = file.read(16)
        return struct.pack("<QQQ", os.getpid(), int(fd), os.stat(path).st_size) + nonce
    raise AssertionError("no client has shared memory")


def wild(generator: random.Random, bits: int) -> int:
    return generator.choice([0, 1, 3, 2**bits - 1, generator.getrandbits(bits)])


def mutated(generator: random.Random, valid: list[bytes]) -> bytes:
    """A stream that is random, or made of requests that are cut, changed, repeated or sealed with wrong fields."""
    how = generator.randrange(6)
    if how == 0:
        return generator.randbytes(generator.randrange(1, 400))
    stream = b"".join(generator.choices(valid, k=generator.randrange(1, 4)))
    if how == 1:
        return stream[: generator.randrange(len(stream))]
    if how == 2:
        place = generator.randrange(len(stream))
        return stream[:place] + generator.randbytes(1) + stream[place + 1 :]
    if how == 3:
        place = generator.randrange(len(stream))
        return stream[:place] + generator.randbytes(generator.randrange(1, 50)) + stream[place:]
    # Heads whose CRC holds, with fields of any value.
    payload = generator.randbytes(generator.choice([0, 8, 16, 96]))
    fields = {
        "number": generator.choice([0, 3, wild(generator, 32)]),
        "count": generator.choice([0, 1, 2, wild(generator, 64)]),
        "own": generator.choice([0, 0, 0, wild(generator, 64)]),
        "all": 0,
        "sequence": wild(generator, 64),
        "cursor": wild(generator, 64),
        "dim": generator.choice([1, 2, wild(generator, 32)]),
        "flags": generator.choice([0, 0, wild(generator, 32)]),
        "values": wild(generator, 8),
        "basis": wild(generator, 64),
        "at": wild(generator, 64),
        "answer_at": wild(generator, 64),
        "unseen_days": wild(generator, 32),
        "weight": generator.choice([1.0, -1.0, float("nan"), float("inf")]),
    }
    length = None if how == 4 else generator.choice([None, wild(generator, 64), 2**31, 2**20])
    return head(generator.choice([*KINDS.values(), wild(generator, 8)]), payload, length=length, **fields) + payload


def test_streams_that_no_client_sends() -> None:
    generator = random.Random(7)
    row = struct.pack("<qf4x", 11, 1.0)
    valid = [
        head("create_table", config(1), number=3) + config(1),
        head("create_range", config(1), number=0, count=2) + config(1),
        head("push_rows", row, number=3, count=1) + row,
        head("pull_rows", row[:8], number=3, count=1) + row[:8],
        head("pull_range", number=0, count=2),
        head("scan", number=3, count=5),
        head("stats"),
    ]
    with job(workers=2) as made:
        healthy = made.join(1)
        healthy.create_table(4, 1)  # a number that the streams leave alone: to shrink a table is their right
        healthy.push(4, [99], 1.0)
        healthy.flush()
        for _ in range(20_000):
            wire = made.wire(client=0)
            with contextlib.suppress(OSError):  # the server may have had enough
                wire.sendall(mutated(generator, valid))
                wire.shutdown(socket.SHUT_WR)
            wire.close()
        eventually(lambda: made.servers[0].connections == 2)
        np.testing.assert_array_equal(healthy.pull(4, [99]), -1)
        healthy.push(4, [99], 1.0)
        healthy.flush()
        np.testing.assert_array_equal(healthy.pull(4, [99]), -2)
        stats = healthy.native.stats()
        assert stats["refused"] > 1000
        assert stats["dropped_connections"] > 1000


class Impostor:
    """A server's end that answers as it is told."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.ends = [there for _, there in pairs]
        fds = [here.detach() for here, _ in pairs]
        self.client = _native.PsClient(0, 1, [fds[0]], [fds[1]], "fp32", [False], ["ps0:7000"], 1.0)

    def close(self) -> None:
        self.client.close()
        for end in self.ends:
            end.close()


@pytest.mark.parametrize("answer", [b"x" * 64, b"\0" * 200, b"x" * 10])
def test_a_client_does_not_believe_a_server(answer: bytes) -> None:
    impostor = Impostor()
    impostor.ends[1].sendall(answer)
    if len(answer) < 64:
        impostor.ends[1].close()
    with pytest.raises(_native.PsError, match=r"server 0 \(ps0:7000\)") as caught:
        impostor.client.stats(0)
    assert caught.value.kind in ("corrupt", "lost")
    impostor.close()


def test_a_server_that_does_not_answer_is_told_of_at_the_deadline() -> None:
    impostor = Impostor()
    begin = time.monotonic()
    with pytest.raises(
        _native.PsError, match=r"server 0 \(ps0:7000\), stats by client 0: no answer for 1\d{3} ms"
    ) as caught:
        impostor.client.stats(0)
    assert caught.value.kind == "timeout"
    assert time.monotonic() - begin < 5
    impostor.close()


def test_a_dead_server_is_noticed_at_once() -> None:
    with job(servers=2) as made:
        client = made.join(0)
        client.create_table(0)
        ids = np.arange(10, dtype=np.int64)
        ticket = client.native.start_pull(0, at(ids), 10, 5)  # waits for a step that does not come
        made.servers[1].stop()
        begin = time.monotonic()
        out = np.empty((10, 4), dtype=np.float32)
        made.servers[0].stop()
        with pytest.raises(
            _native.PsError, match=r"server \d \(host\d:70\d\d\), pull_rows of table 0.*closed"
        ) as caught:
            client.native.finish_pull(ticket, at(out), DEADLINE_SECONDS)
        assert (caught.value.kind, time.monotonic() - begin < 2) == ("lost", True)
        with pytest.raises(_native.PsError, match="closed"):
            client.push(0, ids, 1.0)


def test_a_client_that_is_closed_ends_the_calls_of_other_threads() -> None:
    with job() as made:
        client = made.join(0)
        client.create_table(0)
        ids, out = np.arange(10, dtype=np.int64), np.empty((10, 4), dtype=np.float32)
        ticket = client.native.start_pull(0, at(ids), 10, 5)  # waits for a step that does not come
        told: list[str] = []

        def finish() -> None:
            try:
                client.native.finish_pull(ticket, at(out), DEADLINE_SECONDS)
            except (_native.PsError, ValueError) as error:
                told.append(str(error))

        waiting = threading.Thread(target=finish)
        waiting.start()
        time.sleep(0.1)  # it is in the call by now, or else finds the client closed
        client.native.close()
        waiting.join(DEADLINE_SECONDS)
        assert told[0].endswith(("the client was closed", "the client is closed"))
        with pytest.raises(ValueError, match="the client is closed"):
            client.native.flush()


def mapped() -> int:
    """How often this process has memory mapped that it may share."""
    return sum("memfd" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_client_that_is_closed_while_rows_are_on_their_way_gives_its_memory_back() -> None:
    gc.collect()  # what earlier tests have left
    before = mapped()
    with job() as made:
        client = made.join(0, shared=True)
        client.create_table(0)
        assert client.native.shared == [True]
        ids = np.arange(10, dtype=np.int64)
        client.native.start_pull(0, at(ids), 10, 5)  # of a step that does not come
        client.native.close()
    assert mapped() == before
