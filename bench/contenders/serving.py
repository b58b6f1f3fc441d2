"""What every contender's worker shares: it obeys the benchmark's commands and times its operation.

A worker is one rank. It connects to the benchmark's Unix socket (which crosses network namespaces, and reaches every
rank, where mpiexec hands its standard input to the first one only), and answers each line of JSON with one. Between
its turns it sleeps in a read, so that contenders can stay alive side by side and take turns without disturbing each
other. Plain Python, because the peers' environments have neither torch nor argosy.
"""

from __future__ import annotations

import gc
import json
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Seat:
    """Which rank this worker is, and where it meets the others: the JSON in its first argument."""

    size: int
    socket: str
    rank: int = 0
    store: str = ""
    host: str = ""
    host_id: str | None = None

    @classmethod
    def from_arguments(cls) -> Seat:
        return cls(**json.loads(sys.argv[1]))


@dataclass(frozen=True)
class Operation:
    """Something to time. `prepare` brings all ranks to the same point; `check` looks at one result.

    What `tell` returns goes with the times.
    """

    run: Callable[[], object]
    prepare: Callable[[], object]
    check: Callable[[], None] = lambda: None
    tell: Callable[[], dict[str, float]] = dict


Maker = Callable[[dict[str, Any]], Operation]


def serve(seat: Seat, make: Maker, leave: Callable[[], object] = lambda: None) -> None:
    """Obey until told to leave. `make` turns a command into its operation; operations are kept."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(seat.socket)
    threading.Thread(target=_end_with, args=(line.fileno(),), daemon=True).start()
    stream = line.makefile("rw", encoding="utf-8")
    operations: dict[str, Operation] = {}
    _say(stream, {"rank": seat.rank, "pid": os.getpid()})
    for text in stream:
        command = json.loads(text)
        if command == "leave":
            break
        try:
            key = json.dumps(command["operation"], sort_keys=True)
            if key not in operations:
                operations[key] = make(command["operation"])
                operations[key].prepare()
                operations[key].check()
            _say(stream, measure(operations[key], command["warmup"], command["iterations"]))
        except Exception:
            _say(stream, {"error": traceback.format_exc()})
    operations.clear()
    leave()


def measure(operation: Operation, warmup: int, iterations: int) -> dict[str, float]:
    """Time each of some iterations, back to back: seconds at the quantiles, and on average."""
    clock, run = time.perf_counter_ns, operation.run
    times = [0] * iterations
    operation.prepare()
    gc.collect()
    gc.disable()
    for _ in range(warmup):
        run()
    for number in range(iterations):
        began = clock()
        run()
        times[number] = clock() - began
    gc.enable()
    return {**summary([value * 1e-9 for value in times]), **operation.tell()}


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median, spread and mean of some times."""
    inorder = sorted(seconds)
    last = len(inorder) - 1
    return {
        "median": (inorder[last // 2] + inorder[(last + 1) // 2]) / 2,
        "p10": inorder[round(last * 0.1)],
        "p90": inorder[round(last * 0.9)],
        "mean": sum(inorder) / len(inorder),
        "iterations": len(inorder),
    }


def _say(stream: Any, reply: dict[str, Any]) -> None:
    stream.write(json.dumps(reply) + "\n")
    stream.flush()


def _end_with(descriptor: int) -> None:
    """A benchmark that dies takes its workers along, even one that waits for a peer inside a collective."""
    watch = select.poll()
    watch.register(descriptor, select.POLLRDHUP)
    watch.poll()
    os._exit(0)
