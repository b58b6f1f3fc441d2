"""The guard: a worker and all it started die with the launcher, and only then."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from argosy import _native

# A worker that guards its end, starts a process of its own and then keeps the interpreter busy. Both hold stdout, so
# whoever reads it to its end has seen both die.
WORKER = """
import os, subprocess, sys
from argosy import _native

fd = int(sys.argv[1])
_native.guard(fd)
{then}
subprocess.Popen([sys.executable, "-S", "-c", "print('child', flush=True); import time; time.sleep(60)"])
print("worker", flush=True)
while True:
    pass
"""
DEATH_SECONDS = 5  # generous for a busy machine; it takes milliseconds


@contextmanager
def worker(fd: int, then: str = "") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", WORKER.format(then=then), str(fd)]
    process = subprocess.Popen(
        command, pass_fds=[fd], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, start_new_session=True
    )
    os.close(fd)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_until_up(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert {process.stdout.readline(), process.stdout.readline()} == {"worker\n", "child\n"}


def assert_both_die(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=DEATH_SECONDS)
    assert process.returncode == -signal.SIGKILL


def socket_ends() -> tuple[int, int]:
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()


def pipe_ends() -> tuple[int, int]:
    read, write = os.pipe()
    return write, read


@pytest.mark.parametrize("make_ends", [socket_ends, pipe_ends, os.pipe], ids=["socket", "pipe", "reversed-pipe"])
def test_closing_our_end_kills_worker_and_its_child(make_ends: Callable[[], tuple[int, int]]) -> None:
    ours, theirs = make_ends()
    with worker(theirs, then="os.close(fd)") as process:  # the guard keeps a descriptor of its own
        wait_until_up(process)
        os.close(ours)
        assert_both_die(process)


def test_messages_pass_and_do_not_trigger() -> None:
    ours, theirs = socket.socketpair()
    echo = "import socket; s = socket.socket(fileno=fd); s.sendall(s.recv(100).upper())"
    with ours, worker(theirs.detach(), then=echo) as process:
        ours.sendall(b"message")
        assert ours.recv(100) == b"MESSAGE"
        wait_until_up(process)
        ours.sendall(b"nobody reads this")
        time.sleep(0.2)
        assert process.poll() is None
        ours.close()
        assert_both_die(process)


def test_signals_are_left_to_the_other_threads() -> None:
    ours, theirs = socket_ends()
    mask = """
for task in os.listdir("/proc/self/task"):
    status = dict(line.split(":\\t", 1) for line in open(f"/proc/self/task/{task}/status"))
    if status["Name"] == "argosy-guard\\n":
        print(status["SigBlk"].strip(), flush=True)
"""
    with worker(theirs, then=mask) as process:
        assert process.stdout is not None
        blocked = int(process.stdout.readline(), 16)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1):
            assert blocked & 1 << (number - 1), number
        wait_until_up(process)
        os.kill(process.pid, signal.SIGSTOP)
        os.kill(process.pid, signal.SIGCONT)  # wakes even a thread that blocks all signals
        time.sleep(0.1)
        assert process.poll() is None
        os.close(ours)
        assert_both_die(process)


def test_a_launcher_that_is_already_gone() -> None:
    ours, theirs = socket_ends()
    os.close(ours)
    with worker(theirs) as process:
        assert_both_die(process)


def test_wrong_descriptors_are_refused() -> None:
    read, write = os.pipe()
    os.close(read)
    os.close(write)
    with pytest.raises(OSError, match=f"guard: fd {write}: Bad file descriptor"):
        _native.guard(write)
    with tempfile.TemporaryFile() as file, pytest.raises(ValueError, match=f"fd {file.fileno()} is neither a pipe"):
        _native.guard(file.fileno())
    ours, theirs = socket.socketpair(type=socket.SOCK_DGRAM)
    with ours, theirs, pytest.raises(ValueError, match=f"fd {ours.fileno()} is neither a pipe nor a stream socket"):
        _native.guard(ours.fileno())
