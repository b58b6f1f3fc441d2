"""The `argosy` command as a fork of a process that has torch loaded, and its workers as forks of the command.

Loading torch takes seconds of CPU in each process, most of what a short job costs. Tests of what a job computes start
it here (`launching.FORKED`). It is the launcher's own code, with real processes, sessions, signals and pipes; only no
interpreter is started, so what Python and the C library read at their start (GLIBC_TUNABLES, say) has no effect, and
all workers hash strings alike: what a job does in the order of a set shows only between real ones. So some tests of
training on two workers, of resuming, of two hosts, of launching, of kills and of what the README says start the real
command (`launching.ARGOSY`). A plain script can be forked too (`launching.FORKED_PYTHON`).
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import io
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.reduction import DupFd
from typing import IO, Any

import torch
from namespaces import enter

SERVER = multiprocessing.get_context("forkserver")
# torch loads _dynamo when the first optimizer is made, which takes seconds in each process that has not.
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining"]
PRELOADED += ["argosy.fleet", "argosy.cli.main", "argosy.launch.bootstrap", "argosy.ps.serve"]
PRELOADED += ["hypothesis", "pytest", "ranks", "forked"]  # what files of tests import, which their ranks import too
PRELOADED += ["settled"]
SERVER.set_forkserver_preload(PRELOADED)
NAMESPACE = "TESTS_NAMESPACE"  # the variable that names the network namespace to start a command in


class Command:
    """A started command, or a script if the first word is one; what `launching` needs of `subprocess.Popen`."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self.args = list(words)
        self._written = [tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")]  # noqa: SIM115 - closed when read
        streams = [DupFd(file.fileno()) for file in self._written]
        self._process = SERVER.Process(target=_command, args=(self.args, dict(environment), os.getcwd(), streams))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its status, if it has ended."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; what it has written."""
        self.wait(timeout)
        told = []
        for file in self._written:
            if file.closed:
                told.append("")
                continue
            with file:
                file.seek(0)
                told.append(file.read())
        return told[0], told[1]

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _command(words: list[str], environment: dict[str, str], folder: str, streams: list[Any]) -> None:
    os.chdir(folder)
    namespace = environment.pop(NAMESPACE, None)
    _become(environment, [stream.detach() for stream in streams])
    if namespace is not None:
        enter(namespace)
    sys.argv = words
    if words[0] == "argosy":
        importlib.import_module("argosy.launch.worker").subprocess = _Forking  # type: ignore[attr-defined]
        _end(importlib.import_module("argosy.cli.main").main)
    else:
        for name in [name for name in sys.modules if name.partition(".")[0] == "argosy" and name != "argosy._native"]:
            del sys.modules[name]  # a script imports them in an order of its own
        sys.path.insert(0, os.path.dirname(words[0]))
        _end(lambda: runpy.run_path(words[0], run_name="__main__"))


class _Forking:
    """Stands for `subprocess` where the launcher starts a module of Argosy's."""

    PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL

    class Popen:
        """A fork that runs a module's `main`, with pipes to read what it writes."""

        def __init__(
            self,
            command: Sequence[str],
            *,
            stdin: int,
            stdout: int,
            stderr: int,
            env: Mapping[str, str],
            pass_fds: Sequence[int],
            start_new_session: bool,
        ) -> None:
            assert (stdin, stdout, stderr, start_new_session) == (_Forking.DEVNULL, _Forking.PIPE, _Forking.PIPE, True)
            python, unbuffered, option, module, *arguments = command
            assert (python, unbuffered, option) == (sys.executable, "-u", "-m"), command
            pipes = [os.pipe(), os.pipe()]
            self.pid = os.fork()
            if self.pid == 0:
                try:
                    asyncio.events._set_running_loop(None)
                    signal.set_wakeup_fd(-1)
                    _become(env, [writing for _, writing in pipes], pass_fds)
                    sys.argv = [module, *arguments]
                    sys.path.insert(0, "")
                    _end(importlib.import_module(module).main)
                finally:
                    os._exit(70)
            for _, writing in pipes:
                os.close(writing)
            self.stdout, self.stderr = (os.fdopen(reading, "rb") for reading, _ in pipes)

        def wait(self) -> int:
            """Reap it."""
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _become(environment: Mapping[str, str], streams: Sequence[int], kept: Sequence[int] = ()) -> None:
    """Make of a fork what a new process would be."""
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGPIPE else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for own, given in enumerate([nothing, *streams]):
        os.dup2(given, own)
    if kept:
        _close_all_but({0, 1, 2, *kept})
    os.environ.clear()
    os.environ.update(environment)
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.stdout, sys.stderr = _text(1), _text(2)


def _close_all_but(kept: set[int]) -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in kept:
            with suppress(OSError):  # the listing's own is closed
                os.close(fd)


def _text(fd: int) -> IO[str]:
    return io.TextIOWrapper(open(fd, "wb", buffering=0, closefd=False), encoding="utf-8", write_through=True)


def _end(main: Callable[[], object]) -> None:
    """Run it, and end as an interpreter does, with threads joined and `atexit` heeded; only modules stay."""
    status = 0
    try:
        main()
    except SystemExit as request:
        status = request.code if isinstance(request.code, int) else int(request.code is not None)
        if isinstance(request.code, str):
            print(request.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    os._exit(status)
