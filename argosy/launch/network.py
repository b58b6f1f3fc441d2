"""Which network interface leads to the coordinator: the one on which workers talk to each other."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

_SIOCGIFADDR = 0x8915


def interface_towards(host: str, port: int) -> str | None:
    """The name of the interface whose address is used to reach a host; None where it cannot be told."""
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(address)  # sends nothing: it only chooses the route
            except OSError:
                continue
            own = probe.getsockname()[0]
            if ipaddress.ip_address(own).is_loopback:
                return "lo"
            if family == socket.AF_INET:
                return next((name for _, name in socket.if_nameindex() if _ipv4_of(name) == own), None)
    return None


def _ipv4_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None  # the interface has no such address
    return socket.inet_ntoa(answer[20:24])
