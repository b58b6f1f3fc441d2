"""What a server tells the workers about itself, through the coordinator: where it listens, and which host it is on."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import asdict, dataclass, fields
from typing import Final

from argosy.control.host import MAX_TEXT, HostIdentity

MAX_CARD_BYTES: Final = 4096


def card_key(number: int) -> str:
    """The coordinator's key for the card of a server."""
    return f"servers/{number}"


@dataclass(frozen=True)
class ServerCard:
    """Where one server is: an address and a port, its process, and its host's identity and name.

    >>> card = ServerCard(0, "127.0.0.1", 7000, 123, "box", HostIdentity(None, "boot", 1))
    >>> ServerCard.parse(0, card.to_json()) == card
    True
    """

    number: int
    address: str
    port: int
    pid: int
    name: str
    host: HostIdentity

    def __str__(self) -> str:
        return f"server {self.number} on {self.name} at {self.address} port {self.port}"

    def to_json(self) -> bytes:
        """The form in which it is published."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, number: int, data: bytes) -> ServerCard:
        """What server `number` published; raises `ValueError` unless every field is what it should be."""
        if len(data) > MAX_CARD_BYTES:
            raise ValueError(f"it has {len(data)} bytes")
        given = json.loads(data)
        if not isinstance(given, dict) or set(given) != {field.name for field in fields(cls)}:
            raise ValueError("it has other fields")
        host = given.pop("host")
        if not isinstance(host, dict) or set(host) != {field.name for field in fields(HostIdentity)}:
            raise ValueError("it says otherwise where it is")
        card = cls(**given, host=HostIdentity(**host))
        numbers = (card.number, card.port, card.pid)
        if not all(isinstance(each, int) for each in numbers) or card.number != number or not 0 < card.port < 1 << 16:
            raise ValueError(f"it has the numbers {numbers}")
        texts = (card.address, card.name, card.host.host_id or "", card.host.boot or "")
        if not all(isinstance(text, str) and len(text) <= MAX_TEXT for text in texts):
            raise ValueError("it has text that is none, or too long")
        ipaddress.ip_address(card.address.partition("%")[0])
        return card
