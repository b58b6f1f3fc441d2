"""A short trial of communication on this machine: a few workers join, measure their links, and time all-reduces.

`run` starts the workers and collects what they found. They meet at a file in a folder of their own: nothing listens.
A worker is this module run as a program; it ends when the one who started it does, and it tells its result as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch._C._distributed_c10d import FileStore

from argosy import _native
from argosy.comm.config import CommConfig
from argosy.comm.engine import EngineGroup
from argosy.comm.schedule import Collective
from argosy.comm.select import links_event

SIZES: Final = tuple(1 << power for power in range(10, 27, 2))
_ROUND_SECONDS: Final = 0.15
_JOIN_SECONDS: Final = 30.0


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
            [sys.executable, "-m", "argosy.cli.trial", str(rank), str(workers), str(folder), str(watched)],
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


def main() -> None:
    """Be one of the workers."""
    rank, size, folder, parent = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    _native.guard(parent)
    config = CommConfig(timeout_seconds=_JOIN_SECONDS)
    store = FileStore(str(folder / "store"), size)
    group = EngineGroup.join(store, rank, size, config=config, secret=None, host_id=os.environ.get("ARGOSY_HOST_ID"))
    found = {"links": links_event(group.measure_links()), "sizes": [_timed(group, size_bytes) for size_bytes in SIZES]}
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    group.barrier()
    group.close()


def _timed(group: EngineGroup, size_bytes: int) -> dict[str, Any]:
    """All-reduces of one size: what was chosen, and the median of their times, on the slowest rank."""
    choice = group.selector.choose(Collective.ALL_REDUCE, size_bytes)
    tensor = group.empty(size_bytes // 4)
    for _ in range(3):
        group.all_reduce(tensor)
    # As often as the time allows; the ranks must agree how often.
    times = torch.tensor([min(max(_ROUND_SECONDS / max(choice.seconds, 1e-6), 5), 200)], dtype=torch.float64)
    group.all_reduce(times, "min")
    seconds = []
    for _ in range(int(times)):
        group.barrier()
        begin = time.perf_counter()
        group.all_reduce(tensor)
        seconds.append(time.perf_counter() - begin)
    median = torch.tensor([statistics.median(seconds)], dtype=torch.float64)
    group.all_reduce(median, "max")
    return choice.event(Collective.ALL_REDUCE, size_bytes) | {"measured_seconds": float(median)}


if __name__ == "__main__":
    main()
