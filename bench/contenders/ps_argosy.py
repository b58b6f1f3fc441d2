"""Our parameter server, as `argosy.Embedding` uses it: rows pulled and pushed, each worker reading its own writes.

The first ranks are servers, as many as BENCH_SERVERS says. Worker and server share memory if they share a host.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from typing import Any

import torch
from ps_workload import (
    BATCHES,
    DIM,
    KEPT,
    PATIENCE_SECONDS,
    RATE,
    ROWS,
    addresses,
    ids_of,
    in_circles,
    serves,
)
from serving import Operation, Seat, serve
from torch import Tensor

from argosy import _native, ps

SERVERS = int(os.environ.get("BENCH_SERVERS", "1"))
SQUARES = 0.1  # that Adagrad begins with, as TensorFlow does
RULES = {"adagrad": ps.Adagrad(RATE, initial_accumulator=SQUARES), "sgd": ps.SGD(RATE)}
HELLO = struct.Struct("<II")  # client, lane

Wanted = dict[str, Any]


class Worker:
    """A client of all servers, and its steps."""

    def __init__(self, client: int, servers: list[str], shared: bool) -> None:
        lanes = [[_dial(server, client, lane) for server in servers] for lane in (0, 1)]
        self.number = client
        self.native = _native.PsClient(client, len(servers), *lanes, "fp32", [shared] * len(servers), servers)
        self._distinct = _native.Distinct()
        self._steps = self._pushes = 0

    def rows_of(self, wanted: Wanted) -> Operation:
        """Pull the rows of each batch, and push a gradient for each."""
        table = list(RULES).index(wanted["rule"])
        kept = torch.from_numpy(ids_of(wanted["ids"], self.number)).view(KEPT, -1)
        out = torch.empty(kept.shape[1], DIM)
        gradients = torch.empty_like(out)
        following = in_circles(KEPT)
        self.native.create_table(table, ps.table_config(DIM, RULES[wanted["rule"]], "uniform:0.01"))
        if self.number == 0:
            everything = torch.arange(ROWS)
            values = torch.empty(ROWS, DIM).uniform_(-0.01, 0.01)
            for ids, rows in zip(everything.split(1 << 16), values.split(1 << 16), strict=True):
                self.native.set_rows(table, ids.data_ptr(), len(ids), rows.data_ptr())

        def run() -> None:
            for _ in range(BATCHES):
                self._batch(table, kept[following()], out, gradients)
            self.native.flush(PATIENCE_SECONDS)

        return Operation(run, lambda: None, lambda: self._check(table, wanted["rule"]))

    def _batch(self, table: int, ids: Tensor, out: Tensor, gradients: Tensor) -> None:
        native, distinct, given = self.native, self._distinct, len(ids)
        count = distinct.find(ids.data_ptr(), given)
        asked = native.start_pull(table, distinct.ids_at, count, self._steps, 0, True)
        _native.expand(native.take_pull(asked, PATIENCE_SECONDS), distinct.places_at, given, DIM, out.data_ptr())
        native.release_pull(asked)
        torch.mul(out, 1e-3, out=gradients)
        native.push(
            table,
            distinct.ids_at,
            count,
            gradients.data_ptr(),
            sequence=self._following(),
            places_at=distinct.places_at,
            given=given,
        )
        native.done(self._steps, 1.0)
        self._steps += 1

    def _following(self) -> int:
        self._pushes += 1
        return self._pushes

    def _check(self, table: int, rule: str) -> None:
        mine, ones = torch.tensor([-1 - self.number]), torch.ones(1, DIM)
        before, after = torch.empty(1, DIM), torch.empty(1, DIM)
        self.native.pull(table, mine.data_ptr(), 1, before.data_ptr())
        self.native.push(table, mine.data_ptr(), 1, ones.data_ptr(), sequence=self._following())
        self.native.flush(PATIENCE_SECONDS)
        self.native.pull(table, mine.data_ptr(), 1, after.data_ptr())
        if rule == "sgd" and not torch.allclose(before - after, ones * RATE, atol=1e-6):
            raise AssertionError(f"a push of ones changed a row by {before - after}")
        if not bool((after < before).all()):
            raise AssertionError("a push has not changed its row")


def _dial(server: str, client: int, lane: int) -> int:
    host, port = server.rsplit(":", 1)
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            line = socket.create_connection((host, int(port)), timeout=5)
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.sendall(HELLO.pack(client, lane))
    return line.detach()


def listen(server: _native.PsServer, address: str, workers: int) -> None:
    """Take all connections."""
    host, port = address.rsplit(":", 1)
    with socket.create_server((host, int(port))) as door:
        for _ in range(2 * workers):
            line, _ = door.accept()
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client, lane = HELLO.unpack(line.recv(HELLO.size, socket.MSG_WAITALL))
            server.add_connection(line.detach(), client, lane)


def main() -> None:
    seat = Seat.from_arguments()
    torch.set_num_threads(1)
    everybody = addresses(seat)
    workers = seat.size - SERVERS
    if seat.rank < SERVERS:
        server = _native.PsServer(workers)
        threading.Thread(target=listen, args=(server, everybody[seat.rank], workers), daemon=True).start()
        serve(seat, serves, server.stop)
        return
    near = all(address.startswith(f"{seat.host}:") for address in everybody[:SERVERS])
    worker = Worker(seat.rank - SERVERS, everybody[:SERVERS], shared=near)
    serve(seat, worker.rows_of, worker.native.close)


main()
