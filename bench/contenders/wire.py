"""The wire limit: a plain TCP connection between the first two hosts, with nothing on top.

"stream": n bytes each way at the same time. "ping": a byte there and back.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from serving import Operation, Seat, serve

PIECE = 1 << 20


def connect(seat: Seat) -> socket.socket:
    where, port = seat.store.rsplit(":", 1)
    if seat.rank == 0:
        with socket.create_server((where, int(port))) as server:
            server.settimeout(30)
            line, _ = server.accept()
    else:
        line = _dial((where, int(port)))
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.settimeout(120)
    return line


def _dial(address: tuple[str, int]) -> socket.socket:
    end = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(address, timeout=5)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def receive(line: socket.socket, size: int, into: memoryview) -> None:
    while size:
        got = line.recv_into(into[: min(size, len(into))])
        if not got:
            raise ConnectionError("the other end is gone")
        size -= got


def main() -> None:
    seat = Seat.from_arguments()
    line = connect(seat)
    data, inbox = memoryview(bytearray(PIECE)), memoryview(bytearray(PIECE))

    def send(size: int) -> None:
        while size:
            piece = min(size, PIECE)
            line.sendall(data[:piece])
            size -= piece

    def stream(size: int) -> None:
        sender = threading.Thread(target=send, args=(size,))
        sender.start()
        receive(line, size, inbox)
        sender.join()

    def ping() -> None:
        for turn in (0, 1):
            if turn == seat.rank:
                line.sendall(data[:1])
            else:
                receive(line, 1, inbox)

    def make(wanted: dict[str, Any]) -> Operation:
        run = ping if wanted["way"] == "ping" else lambda: stream(wanted["bytes"])
        return Operation(run, prepare=ping)

    serve(seat, make)


main()
