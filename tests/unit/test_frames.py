"""Heads of frames: what is believed, and what is refused by name."""

import random

import pytest
from frames_harness import ABORT, BEAT, DATA, MAX_PAYLOAD, head

from argosy import _native

FUZZED = 100_000


def test_a_good_head() -> None:
    fields = {
        "type": DATA,
        "sequence": 2**64 - 1,
        "operation": 77,
        "count": 10**12,
        "offset": 2**40,
        "message": 3,
        "length": MAX_PAYLOAD,
        "from": 5,
        "payload_crc": 9,
    }
    assert _native.check_frame(head(**fields), 5) == fields
    for kind in (BEAT, ABORT):
        assert _native.check_frame(head(type=kind), 0)["type"] == kind


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"magic": 1}, "magic is 1, not"),
        ({"seal": False}, "head_crc does not hold"),
        ({"type": 0}, "type 0 is unknown"),
        ({"type": 4}, "type 4 is unknown"),
        ({"reserved": 6}, "reserved is 6, not 0"),
        ({"length": MAX_PAYLOAD + 1}, "length is 1048577, more than 1048576"),
        ({"length": 4097, "type": ABORT}, "length of an abort is 4097, more than 4096"),
        ({"from": 1}, "from is 1"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, int], message: str) -> None:
    with pytest.raises(_native.Failure, match=f"a frame from rank 0 is corrupt: {message}") as caught:
        _native.check_frame(head(**fields), 0)
    assert (caught.value.kind, caught.value.peer) == ("corrupt", 0)


def test_every_single_bit_is_guarded() -> None:
    good = head(sequence=5, operation=6, count=7, length=8)
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(_native.Failure):
            _native.check_frame(bytes(bad), 0)


def test_any_64_bytes_are_refused_or_right() -> None:
    source = random.Random(4)
    names = ["magic", "type", "length", "reserved", "from", "sequence", "offset"]
    limits = {"sequence": 64, "offset": 64}
    refused = accepted = 0
    for number in range(FUZZED):
        if number % 2:
            data = source.randbytes(64)
        else:
            name = source.choice(names)
            data = head(**{name: source.getrandbits(source.choice([1, 3, 20, limits.get(name, 32)]))})
        try:
            fields = _native.check_frame(data, 0)
        except _native.Failure as failure:
            refused += failure.kind == "corrupt"
        else:
            accepted += 1
            assert fields["length"] <= MAX_PAYLOAD
            assert fields["type"] in (DATA, BEAT, ABORT)
    assert refused + accepted == FUZZED
    assert accepted > 1000


def test_heads_of_other_lengths() -> None:
    with pytest.raises(ValueError, match="64 bytes, not 63"):
        _native.check_frame(bytes(63), 0)
