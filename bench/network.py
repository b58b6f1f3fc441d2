"""Hosts that are network namespaces: joined by a veth pair if there are two, by a bridge if there are more.

A limit holds for each host's link and each direction by itself: the host's own end shapes what it sends, the other end
what it receives. tbf, because it is in every kernel. Its burst is what a link lets through at once after a rest: a
small one keeps short transfers honest. Its queue is long, so that nothing is dropped.

tbf lets packets go on whichever core is at hand, and there a veth hands them over: those of one connection overtake
each other, which TCP takes for a loss. Hence packets are steered on limited links: all of a connection to one core.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from crew import Place

DEVICE = "eth0"  # of every host
CORES = f"{(1 << min(os.cpu_count() or 1, 32)) - 1:x}"  # as a mask
STEER = f"for queue in /sys/class/net/*/queues/rx-*; do echo {CORES} > $queue/rps_cpus || exit 1; done"


class NoNetwork(Exception):
    """Namespaces cannot be made here."""


def possible() -> str | None:
    """Why namespaces cannot be made here, if so."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found: install iproute2" if missing else None


@contextmanager
def network(hosts: int, per_host: int, mbits: float | None, congestion: str = "") -> Iterator[list[Place]]:
    """Make hosts with a limit on each link, if any; the place of each rank. All is removed at the end.

    `congestion` names TCP's congestion control, for which this machine's own default is taken otherwise.
    """
    tag = f"argosy-{uuid.uuid4().hex[:6]}"
    names = [f"{tag}-{number}" for number in range(hosts)]
    switch = f"{tag}-switch"
    made: list[str] = []
    try:
        for name in [*names, switch] if hosts > 2 else names:
            _run("ip", "netns", "add", name)
            made.append(name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _wire(names, switch)
        for number, name in enumerate(names):
            _run("ip", "-n", name, "address", "add", f"10.214.9.{number + 1}/24", "dev", DEVICE)
            _run("ip", "-n", name, "link", "set", DEVICE, "up")
            if congestion:
                setting = f"echo {congestion} > /proc/sys/net/ipv4/tcp_congestion_control"
                _run("ip", "netns", "exec", name, "sh", "-c", setting)
            if mbits is not None:
                _limit(name, DEVICE, mbits)
                if hosts > 2:
                    _limit(switch, f"port{number}", mbits)
        for name in made if mbits is not None else ():
            _run("ip", "netns", "exec", name, "sh", "-c", STEER)
        yield [
            Place(("ip", "netns", "exec", name), f"10.214.9.{number + 1}", name)
            for number, name in enumerate(names)
            for _ in range(per_host)
        ]
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=30)


def _wire(names: list[str], switch: str) -> None:
    if len(names) == 2:
        ends = ["name", DEVICE, "netns", names[1]]
        _run("ip", "link", "add", DEVICE, "netns", names[0], "type", "veth", "peer", *ends)
        return
    _run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "bridge0", "up")
    for number, name in enumerate(names):
        ends = ["name", f"port{number}", "netns", switch]
        _run("ip", "link", "add", DEVICE, "netns", name, "type", "veth", "peer", *ends)
        _run("ip", "-n", switch, "link", "set", f"port{number}", "master", "bridge0", "up")


def _limit(name: str, device: str, mbits: float) -> None:
    # A burst of a millisecond, and packets of a quarter. Those that leave a socket may have 64 KiB, which is nothing to
    # a fast link; a slow one would have them wait for each other, and be passed on whole, as no Ethernet does.
    bytes_per_ms = mbits * 1e6 / 8 / 1000
    packet = min(max(int(bytes_per_ms / 4), 3000), 65_536)
    _run("ip", "-n", name, "link", "set", device, "gso_max_size", str(packet))
    words = ["rate", f"{mbits:g}mbit", "burst", str(max(int(bytes_per_ms), packet + 2000)), "limit", str(32 << 20)]
    _run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *words)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    if done.returncode != 0:
        raise NoNetwork(f"{' '.join(command)}: {done.stderr.strip()}")
