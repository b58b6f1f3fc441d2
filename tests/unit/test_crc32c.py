"""CRC32C: the vectors of RFC 3720, and every way of this CPU against the plain table."""

import random

import pytest

from argosy import _native

WAYS = _native.crc32c_ways()
VECTORS = [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]


@pytest.mark.parametrize("way", [None, *WAYS])
@pytest.mark.parametrize(("data", "value"), VECTORS, ids=["nothing", "digits", "zeros", "ones", "up", "down"])
def test_known_values(way: str | None, data: bytes, value: int) -> None:
    assert _native.crc32c(data, way=way) == value


@pytest.mark.parametrize("way", WAYS)
def test_every_length_against_the_table(way: str) -> None:
    source = random.Random(1)
    for size in [*range(1100), 4096, 12_287, 12_288, 12_289, 65_536, 262_144 + 77]:
        data, seed = source.randbytes(size), source.getrandbits(32)
        assert _native.crc32c(data, seed, way) == _native.crc32c(data, seed, "table"), size


@pytest.mark.parametrize("way", WAYS)
def test_parts_give_what_the_whole_gives(way: str) -> None:
    data = random.Random(2).randbytes(20_000)
    for cut in (0, 1, 63, 256, 12_345, 20_000):
        assert _native.crc32c(data[cut:], _native.crc32c(data[:cut], 0, way), way) == _native.crc32c(data)


def test_a_way_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="by 'hand'"):
        _native.crc32c(b"", 0, "hand")
