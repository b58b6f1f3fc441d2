"""Frames made by hand, as a peer would put them on the wire, or as none would."""

from __future__ import annotations

import struct

from argosy import _native

MAGIC, DATA, BEAT, ABORT = 0x59475241, 1, 2, 3
MAX_PAYLOAD = 1 << 20
FIELDS = struct.Struct("<IIQQQQIIIII")  # all but head_crc


def head(*, seal: int = True, **fields: int) -> bytes:
    """The 64 bytes of a head, with its CRC."""
    values = {
        "magic": MAGIC,
        "type": DATA,
        "sequence": 0,
        "operation": 0,
        "count": 0,
        "offset": 0,
        "message": 0,
        "length": 0,
        "reserved": 0,
        "from": 0,
        "payload_crc": 0,
    }
    assert not fields.keys() - values.keys()
    data = FIELDS.pack(*(values | fields).values())
    return data + struct.pack("<I", _native.crc32c(data) if seal else 0)


def frame(payload: bytes, **fields: int) -> bytes:
    """A whole frame, with both CRCs."""
    return head(**{"length": len(payload), "payload_crc": _native.crc32c(payload)} | fields) + payload
