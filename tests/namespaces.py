"""Hosts on one machine: network namespaces whose only link is each other."""

from __future__ import annotations

import ctypes
import os
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ADDRESSES = ("10.213.7.1", "10.213.7.2")
_CLONE_NEWNET = 0x40000000


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def enter(namespace: str) -> None:
    """Move this process into a network namespace."""
    with open(f"/var/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")


@contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two namespaces joined by a veth pair, `wire0` and `wire1`. Skips the test where none can be made, save in CI."""
    names = (f"argosy-{uuid.uuid4().hex[:6]}-0", f"argosy-{uuid.uuid4().hex[:6]}-1")
    made = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
                made.append(name)
            ip("link", "add", "wire0", "netns", names[0], "type", "veth", "peer", "name", "wire1", "netns", names[1])
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            if os.environ.get("CI"):
                raise
            pytest.skip(f"network namespaces cannot be made here: {error}")
        for number, name in enumerate(names):
            ip("-n", name, "address", "add", f"{ADDRESSES[number]}/24", "dev", f"wire{number}")
            ip("-n", name, "link", "set", f"wire{number}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in made:
            ip("netns", "del", name)
