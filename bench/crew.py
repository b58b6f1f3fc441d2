"""A crew: the processes of one contender, one for each rank, kept alive between their turns.

Every wait has a deadline; a crew that fails says what its processes wrote, and none of them outlives the block.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CONTENDERS = Path(__file__).parent / "contenders"
THREADS = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
START_SECONDS = 90.0


class CrewFailed(Exception):
    """A contender could not be started, failed, or did not answer in time."""


@dataclass(frozen=True)
class Place:
    """Where a rank runs: the words before its command (to enter a namespace), its address and its host's name."""

    enter: tuple[str, ...] = ()
    address: str = "127.0.0.1"
    host_id: str | None = None


@dataclass(frozen=True)
class Contender:
    """How to start a contender: its script, the Python that runs it, and mpiexec's words if that starts the ranks."""

    name: str
    script: str
    python: str = sys.executable
    mpiexec: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class Crew:
    """The ranks of a contender, started and connected."""

    def __init__(self, contender: Contender, places: Sequence[Place]) -> None:
        self.name, self._size = contender.name, len(places)
        self._folder = tempfile.TemporaryDirectory(prefix="argosy-bench-")
        self._output = open(Path(self._folder.name) / "output", "w+b")  # noqa: SIM115 - closed by `close`
        self._started: list[subprocess.Popen[bytes]] = []
        self._lines: list[socket.socket] = []
        try:
            self._start(contender, places)
        except BaseException:
            self.close(patience_seconds=0.0)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(patience_seconds=0.0 if error else 5.0)

    def ask(self, operation: Mapping[str, Any], warmup: int, iterations: int, deadline_seconds: float) -> list[Any]:
        """Have all ranks time an operation; their answers, by rank."""
        command = {"operation": operation, "warmup": warmup, "iterations": iterations}
        text = (json.dumps(command) + "\n").encode()
        end = time.monotonic() + deadline_seconds
        for line in self._lines:
            line.sendall(text)
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < self._size:
            # Whoever answers first is heard first: a rank that failed, before those that wait for it in vain.
            waiting = {line: rank for rank, line in enumerate(self._lines) if rank not in answers}
            heard, _, _ = select.select(list(waiting), [], [], max(0.0, end - time.monotonic()))
            for line in heard or list(waiting)[:1]:
                answer = self._answer(line, end)
                if "error" in answer:
                    raise CrewFailed(f"{self.name}, rank {waiting[line]}:\n{answer['error']}")
                answers[waiting[line]] = answer
        return [answers[rank] for rank in range(self._size)]

    def close(self, patience_seconds: float) -> None:
        """Let the processes leave; those that do not in this time are killed."""
        for line in self._lines:
            with suppress(OSError):
                line.sendall(b'"leave"\n')
        end = time.monotonic() + patience_seconds
        for process in self._started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        for line in self._lines:
            line.close()  # the workers' own watch on it ends those that still run, also below an mpiexec
        for process in self._started:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._output.close()
        self._folder.cleanup()

    def _start(self, contender: Contender, places: Sequence[Place]) -> None:
        path = str(Path(self._folder.name) / "line")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(path)
            server.listen(self._size)
            shared = {"size": self._size, "socket": path, "store": f"{places[0].address}:{free_port()}"}
            script = [contender.python, str(CONTENDERS / contender.script)]
            if contender.mpiexec:
                self._run([*contender.mpiexec, *script, json.dumps(shared)], contender.environment)
            else:
                for rank, place in enumerate(places):
                    seat = {**shared, "rank": rank, "host": place.address, "host_id": place.host_id}
                    self._run([*place.enter, *script, json.dumps(seat)], contender.environment)
            self._greet(server)

    def _run(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env={**os.environ, **THREADS, **environment},
            start_new_session=True,
        )
        self._started.append(process)

    def _greet(self, server: socket.socket) -> None:
        end = time.monotonic() + START_SECONDS
        server.settimeout(0.5)
        lines: dict[int, socket.socket] = {}
        while len(lines) < self._size:
            try:
                line, _ = server.accept()
            except TimeoutError:
                if time.monotonic() > end or any(process.poll() is not None for process in self._started):
                    raise CrewFailed(f"{self.name}: {len(lines)} of {self._size} ranks came\n{self._said()}") from None
                continue
            self._lines.append(line)
            lines[self._answer(line, end)["rank"]] = line
        self._lines = [lines[rank] for rank in range(self._size)]

    def _answer(self, line: socket.socket, end: float) -> dict[str, Any]:
        received = b""
        while not received.endswith(b"\n"):
            line.settimeout(max(0.01, end - time.monotonic()))
            try:
                got = line.recv(65536)
            except TimeoutError:
                raise CrewFailed(f"{self.name}: no answer in time\n{self._said()}") from None
            if not got:
                raise CrewFailed(f"{self.name}: a rank is gone\n{self._said()}")
            received += got
        answer: dict[str, Any] = json.loads(received)
        return answer

    def _said(self) -> str:
        self._output.flush()
        self._output.seek(0)
        return self._output.read()[-4000:].decode(errors="replace")


def free_port() -> int:
    """A port that nobody listens on now, and that no connection is given: namespaces have connections of their own."""
    while True:
        port = random.randrange(10_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
