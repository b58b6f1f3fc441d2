"""Starting real jobs in tests: always with a deadline, and never leaving a process behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forked import Command

ARGOSY = [sys.executable, "-m", "argosy"]
FORKED = ["forked", "argosy"]  # the same command, without the seconds that loading torch takes: see `forked.py`
FORKED_PYTHON = ["forked"]  # and a script
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
Started = subprocess.Popen[str] | Command


@dataclass
class Finished:
    status: int
    out: str
    err: str
    seconds: float


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def finish(process: Started, deadline_seconds: float) -> Finished:
    """Wait for a started command; kill its whole group when the deadline passes."""
    began = time.monotonic()
    try:
        out, err = process.communicate(timeout=deadline_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"no end after {deadline_seconds} s\n--- stdout\n{out}\n--- stderr\n{err}") from None
    except BaseException:  # the test's own deadline has passed, or somebody has interrupted it
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return Finished(process.returncode, out, err, time.monotonic() - began)


def start(command: Sequence[str | Path], **environment: str) -> Started:
    """Start a command in a process group of its own."""
    words = [str(word) for word in command]
    if words[0] == FORKED[0]:
        return Command(words[1:], {**os.environ, **environment})
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
        start_new_session=True,
        preexec_fn=_as_from_a_terminal,
    )


def _as_from_a_terminal() -> None:
    """A shell that starts the tests in the background, or nohup, has them ignore signals, and what they start too."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def run(command: Sequence[str | Path], deadline_seconds: float = 90, **environment: str) -> Finished:
    return finish(start(command, **environment), deadline_seconds)


def succeed(command: Sequence[str | Path], deadline_seconds: float = 90, **environment: str) -> Finished:
    """Run a command that must end well."""
    finished = run(command, deadline_seconds, **environment)
    assert finished.status == 0, f"status {finished.status}\n--- stdout\n{finished.out}\n--- stderr\n{finished.err}"
    return finished


@contextmanager
def running(command: Sequence[str | Path], **environment: str) -> Iterator[Started]:
    """A started command that is killed, if need be, at the end of the block."""
    process = start(command, **environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for(condition, deadline_seconds: float, what: str) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + deadline_seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {deadline_seconds} s"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids(folder: Path) -> list[int]:
    """The processes that wrote their number into a folder, as `N.pid` files."""
    return [int(file.stem) for file in folder.glob("*.pid")]
