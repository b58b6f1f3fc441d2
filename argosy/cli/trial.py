"""A short trial of communication on this machine: a few workers join, measure their links, and time all-reduces.

`run` starts the workers and collects what they found. They meet at a file in a folder of their own: nothing listens.
A worker is `trial_worker.py` run as a program; it ends when the one who started it does, and it tells its result as
JSON. It is a module of its own because it needs torch, which takes seconds to load.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any


class TrialError(RuntimeError):
    """A trial that came to nothing: why, and what a worker said last."""


def run(workers: int, deadline_seconds: float = 60.0) -> dict[str, Any]:
    """What the workers found: `links`, the fields of that event; `sizes`, those of `algorithm` with measured times."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="argosy-doctor-")))
        started: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, started)
        watched, held = os.pipe()
        stack.callback(os.close, held)
        with os.fdopen(watched, "rb"):
            started.extend(_start(rank, workers, folder, watched) for rank in range(workers))
        _wait(started, folder, deadline_seconds)
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
        return found


def _start(rank: int, workers: int, folder: Path, watched: int) -> subprocess.Popen[bytes]:
    """Start a worker; it ends itself when the other end of `watched` closes, however this process ends."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // workers))
    with (folder / f"{rank}.err").open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "argosy.cli.trial_worker", str(rank), str(workers), str(folder), str(watched)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "OMP_NUM_THREADS": threads},
            pass_fds=[watched],
            start_new_session=True,
        )


def _wait(started: list[subprocess.Popen[bytes]], folder: Path, deadline_seconds: float) -> None:
    """Return when all workers have ended well; the first one that fails is told."""
    deadline = time.monotonic() + deadline_seconds
    while True:
        statuses = [process.poll() for process in started]
        for rank, status in enumerate(statuses):
            if status:
                said = (folder / f"{rank}.err").read_text(errors="replace").strip().splitlines()
                raise TrialError(f"worker {rank} ended with status {status}: {said[-1] if said else 'without a word'}")
        if None not in statuses:
            return
        if time.monotonic() > deadline:
            raise TrialError(f"the workers were not done after {deadline_seconds:g} s")
        time.sleep(0.01)


def _end(started: list[subprocess.Popen[bytes]]) -> None:
    for process in started:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
