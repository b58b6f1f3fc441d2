"""A parameter server and its clients in one process, over socketpairs; and requests written byte by byte."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from argosy import _native

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
DEADLINE_SECONDS = 20.0
MAGIC, VERSION, HEAD_BYTES, REPLY_BYTES = 0x53505241, 1, 136, 64
KINDS = {
    name: number
    for number, name in enumerate(
        [
            "attach",
            "create_table",
            "create_range",
            "pull_rows",
            "push_rows",
            "set_rows",
            "pull_range",
            "push_range",
            "set_range",
            "done",
            "leave",
            "stats",
            "end_day",
            "shrink",
            "scan",
            "rest",
        ],
        start=1,
    )
}
WRONGS = [
    "none",
    "malformed",
    "too_large",
    "version",
    "unknown_table",
    "mismatch",
    "not_finite",
    "too_few",
    "unmapped",
    "internal",
]


def at(array: npt.NDArray[Any]) -> int:
    assert array.flags.c_contiguous
    return int(array.__array_interface__["data"][0])


def config(dim: int = 4, lr: float = 1.0, start: float = 0.0, rule: str = "sgd") -> bytes:
    """A table whose rows begin as `start`."""
    return _native.table_config(dim, rule, lr=lr, initializer="constant", low_or_mean=start)


class Client:
    """A PsClient that takes and returns arrays."""

    def __init__(self, native: _native.PsClient) -> None:
        self.native = native
        self.dims: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        self.sequence = 0

    def create_table(self, number: int, dim: int = 4, **rest: Any) -> None:
        self.native.create_table(number, config(dim, **rest))
        self.dims[number] = dim

    def create_range(self, number: int, count: int, server: int = 0, **rest: Any) -> None:
        self.native.create_range(number, config(1, **rest), count, server)
        self.counts[number] = count

    def pull(
        self,
        table: int,
        ids: Sequence[int] | Ids,
        own: int = 0,
        all: int = 0,
        timeout: float = DEADLINE_SECONDS,
        distinct: bool = False,
    ) -> Floats:
        wanted = np.asarray(ids, dtype=np.int64)
        out = np.empty((len(wanted), self.dims[table]), dtype=np.float32)
        self.native.pull(table, at(wanted), len(wanted), at(out), own, all, timeout, distinct)
        return out

    def push(self, table: int, ids: Sequence[int] | Ids, gradients: Any, **rest: Any) -> None:
        """Gradients are a number for all, or an array."""
        distinct = np.asarray(ids, dtype=np.int64)
        rows = np.broadcast_to(np.asarray(gradients, dtype=np.float32), (len(distinct), self.dims[table])).copy()
        self.sequence += 1
        options = {"sequence": self.sequence, **rest}
        self.native.push(table, at(distinct), len(distinct), at(rows), **options)

    def pull_range(self, number: int, own: int = 0, all: int = 0) -> Floats:
        out = np.empty(self.counts[number], dtype=np.float32)
        self.native.pull_range(number, at(out), own, all, DEADLINE_SECONDS)
        return out

    def push_range(self, number: int, gradients: Any, **rest: Any) -> None:
        numbers = np.broadcast_to(np.asarray(gradients, dtype=np.float32), self.counts[number]).copy()
        self.sequence += 1
        self.native.push_range(number, at(numbers), **{"sequence": self.sequence, **rest})

    def set_range(self, number: int, values: Any) -> None:
        numbers = np.broadcast_to(np.asarray(values, dtype=np.float32), self.counts[number]).copy()
        self.native.set_range(number, at(numbers))

    def done(self, step: int, weight: float = 1.0, batches: int = 1, may_be_late: bool = False) -> None:
        self.native.done(step, weight, batches, may_be_late)

    def flush(self) -> None:
        self.native.flush(DEADLINE_SECONDS)


@dataclass
class Job:
    """Servers, and what is connected to them."""

    servers: list[_native.PsServer]
    clients: list[Client] = field(default_factory=list)

    def join(
        self, client: int, values: str = "fp32", shared: bool = False, timeout: float = DEADLINE_SECONDS
    ) -> Client:
        pulls, pushes = [], []
        for server in self.servers:
            for lane, fds in enumerate((pulls, pushes)):
                here, there = socket.socketpair()
                server.add_connection(there.detach(), client, lane)
                fds.append(here.detach())
        names = [f"host{number}:70{number:02}" for number in range(len(self.servers))]
        count = len(self.servers)
        native = _native.PsClient(client, count, pulls, pushes, values, [shared] * count, names, timeout)
        self.clients.append(Client(native))
        return self.clients[-1]

    def wire(self, client: int = 0, server: int = 0) -> socket.socket:
        """A bare connection."""
        here, there = socket.socketpair()
        self.servers[server].add_connection(there.detach(), client, 0)
        here.settimeout(DEADLINE_SECONDS)
        return here


@contextlib.contextmanager
def job(servers: int = 1, workers: int = 1, aggregate: int = 0, reject_not_finite: bool = True) -> Iterator[Job]:
    made = Job([_native.PsServer(workers, aggregate, reject_not_finite) for _ in range(servers)])
    try:
        yield made
    finally:
        for client in made.clients:
            client.native.close()
        for server in made.servers:
            server.stop()


def head(
    kind: str | int, payload: bytes = b"", *, length: int | None = None, seal: bool = True, **fields: Any
) -> bytes:
    """A request's head, with any field as wanted."""
    given: dict[str, Any] = {
        "magic": MAGIC, "version": VERSION, "values": 0, "client": 0, "number": 0, "sequence": 0, "count": 0, "own": 0,
        "all": 0, "basis": 0, "cursor": 0, "dim": 1, "flags": 0, "lr_factor": 1.0, "compensation": 0.0, "weight": 0.0,
        "decay_or_score": 0.0, "click_weight": 0.0, "unseen_days": 0, "reserved": 0, "at": 0, "answer_at": 0,
        "payload_crc": _native.crc32c(payload), **fields,
    }  # fmt: skip
    g = given
    packed = struct.pack(
        "<IHBBIIQQQQQQIIffdffIIQQQI",
        g["magic"], g["version"], KINDS[kind] if isinstance(kind, str) else kind, g["values"], g["client"], g["number"],
        g["sequence"], g["count"], g["own"], g["all"], g["basis"], g["cursor"], g["dim"], g["flags"], g["lr_factor"],
        g["compensation"], g["weight"], g["decay_or_score"], g["click_weight"], g["unseen_days"], g["reserved"],
        len(payload) if length is None else length, g["at"], g["answer_at"], g["payload_crc"],
    )  # fmt: skip
    packed += struct.pack("<I", _native.crc32c(packed) if seal else 0)
    assert len(packed) == HEAD_BYTES
    return packed


def receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError(f"the connection ended after {len(data)} of {count} bytes")
        data += more
    return data


@dataclass(frozen=True)
class Reply:
    wrong: str
    sequence: int
    count: int
    cursor: int
    global_step: int
    payload: bytes

    @property
    def text(self) -> str:
        return self.payload.decode()


def reply(connection: socket.socket) -> Reply:
    """The next answer, whose CRCs must hold."""
    data = receive(connection, REPLY_BYTES)
    magic, version, wrong, _, sequence, count, cursor, step, _, length, payload_crc, head_crc = struct.unpack(
        "<IHBBQQQQQQII", data
    )
    assert (magic, version, head_crc) == (MAGIC, VERSION, _native.crc32c(data[:60]))
    payload = receive(connection, length)
    assert payload_crc == _native.crc32c(payload)
    return Reply(WRONGS[wrong], sequence, count, cursor, step, payload)


def ask(connection: socket.socket, kind: str | int, payload: bytes = b"", **fields: Any) -> Reply:
    connection.sendall(head(kind, payload, **fields) + payload)
    return reply(connection)


def eventually(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.002)
