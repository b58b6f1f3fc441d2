"""What this machine offers for communication: cores, memory, limits, networks, and what is wrong with them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from argosy import _native
from argosy.control.network import ipv4_of
from argosy.optim.tiles import ADVICE

_ENOUGH_FILES: Final = 4096


class Fact(NamedTuple):
    """Something about this machine; `trouble` says what is amiss and what to do, if anything is."""

    name: str
    value: str
    trouble: str = ""


def facts() -> Iterator[Fact]:
    """All of them, in the order in which they are shown."""
    yield Fact("kernel", f"{platform.system()} {platform.release()}")
    yield Fact("argosy", importlib.metadata.version("argosy"))
    yield Fact("torch", importlib.metadata.version("torch"))
    yield _cores()
    yield Fact("instructions", ", ".join(_native.instruction_sets()), ADVICE if _native.tiles_are_hidden() else "")
    yield _memory()
    yield shared_memory()
    yield files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    for name in ("ARGOSY_HOST_ID", "ARGOSY_SECRET"):
        if name in os.environ:
            yield Fact(name, "set" if name == "ARGOSY_SECRET" else os.environ[name])
    yield from interfaces()


def _cores() -> Fact:
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return Fact("cores", str(usable) if usable == there else f"{usable} of {there}")


def _memory() -> Fact:
    sizes = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith("kB"):
            sizes[name] = int(value.split()[0]) * 1024
    return Fact("memory", f"{sizes['MemAvailable'] / 2**30:.1f} of {sizes['MemTotal'] / 2**30:.1f} GiB available")


def shared_memory() -> Fact:
    """Whether workers of this host can share memory: it is theirs alone, has no name, and goes with them."""
    try:
        memory = os.memfd_create("argosy-doctor", os.MFD_CLOEXEC)
        try:
            os.ftruncate(memory, 1 << 20)
            with open(f"/proc/{os.getpid()}/fd/{memory}", "r+b"):
                pass
        finally:
            os.close(memory)
    except OSError as error:
        fix = "workers of one host will talk over TCP; allow memfd_create and /proc (a seccomp profile may forbid them)"
        return Fact("shared memory", "not usable", f"{error}: {fix}")
    return Fact("shared memory", "usable (memfd)")


def files(soft: int, hard: int) -> Fact:
    """How many files and sockets a process may have open."""
    told = ["unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in (soft, hard)]
    few = soft != resource.RLIM_INFINITY and soft < _ENOUGH_FILES
    fix = f"enough for some {max(soft - 100, 0) // 6} workers on other hosts; for more, `ulimit -n {_ENOUGH_FILES}`"
    return Fact("open files", f"{told[0]} (at most {told[1]})", fix if few else "")


def interfaces() -> Iterator[Fact]:
    """The networks of this machine that are up and have an address."""
    found = False
    for _, name in socket.if_nameindex():
        address = ipv4_of(name)
        if address is None:
            continue
        found = found or name != "lo"
        megabits = _speed(name)
        yield Fact(f"network {name}", address + (f", {megabits / 1000:g} Gbit/s" if megabits else ""))
    if not found:
        yield Fact(
            "network", "none", "no interface but loopback has an address: workers on other hosts are out of reach"
        )


def _speed(interface: str) -> int | None:
    """What the driver says, in Mbit/s; virtual ones often say nothing."""
    try:
        megabits = int(Path(f"/sys/class/net/{interface}/speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits if megabits > 0 else None
