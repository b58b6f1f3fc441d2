"""Which way leads to a host: the own address, and the interface, by which workers reach the coordinator."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from typing import Final

LOOPBACK: Final = "127.0.0.1"
_SIOCGIFADDR: Final = 0x8915


def address_towards(host: str, port: int) -> str | None:
    """The own address from which a host is reached; None where it cannot be told.

    >>> address_towards("127.0.0.1", 1)
    '127.0.0.1'
    """
    return next(_own_addresses(host, port), None)


def interface_towards(host: str, port: int) -> str | None:
    """The name of the interface whose address is used to reach a host; None where it cannot be told."""
    for own in _own_addresses(host, port):
        if is_loopback(own):
            return "lo"
        for _, name in socket.if_nameindex():
            if ipv4_of(name) == own:
                return name
    return None


def _own_addresses(host: str, port: int) -> Iterator[str]:
    """For each address that a host's name stands for and that there is a way to: the own one."""
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(address)  # sends nothing: it only chooses the route
            except OSError:
                continue
            yield str(probe.getsockname()[0])


def is_loopback(address: str) -> bool:
    """Whether an address is reached from this machine alone."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def ipv4_of(interface: str) -> str | None:
    """The IPv4 address of an interface, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None  # the interface has no such address
    return socket.inet_ntoa(answer[20:24])
