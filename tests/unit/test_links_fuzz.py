"""Links given streams that no peer would send: 100,000 of them, from a seeded generator."""

from __future__ import annotations

import random
import socket

import numpy as np
from frames_harness import frame

from argosy import _native
from argosy.comm.schedule import COPY, REDUCE

FUZZED, COUNT = 100_000, 1000


def mutated(source: random.Random) -> list[bytes]:
    """What comes on two lanes: some frames, most of them good ones, reordered, changed with or without their CRC."""
    frames = []
    for message, (total, size) in enumerate([(1000, 256), (3000, 256)]):
        for offset in range(0, total, size):
            fields = {"message": message, "from": 1}
            if source.random() < 0.08:
                name = source.choice(["offset", "message", "length", "sequence", "operation", "count", "type", "from"])
                fields[name] = source.getrandbits(source.choice([1, 2, 4, 9, 12, 32]))
                if name == "type":
                    fields["operation"] = 3  # should it be an abort: of the kind that is told apart from the others
            payload = source.randbytes(min(size, total - offset))
            fields = {"sequence": 1, "count": COUNT, "offset": offset} | fields
            frames.append(frame(payload, **fields))
    if source.random() < 0.3:
        source.shuffle(frames)
    lanes = [b"", b""]
    for data in frames:
        if source.random() < 0.03:
            place = source.randrange(len(data))
            data = data[:place] + bytes([data[place] ^ 1 << source.randrange(8)]) + data[place + 1 :]
        if source.random() < 0.03:
            data = data[: source.randrange(len(data))]
        lanes[source.random() < 0.3] += data
    return lanes


def test_no_stream_of_bytes_does_harm() -> None:
    """Every stream ends, so each is received, or refused, or its end is noticed; nothing outside is written."""
    source = random.Random(5)
    memory = np.full(12_000, 0xA5, np.uint8)
    base = memory.__array_interface__["data"][0]
    steps = [(REDUCE, 1, base + 4000, 1000), (COPY, 1, base + 5000, 3000)]
    seen: dict[str, int] = {}
    streams = [mutated(source) for _ in range(500)]
    for number in range(FUZZED):
        if number % 20 == 19:  # parts of one with parts of another are new ones
            streams[number % 500] = mutated(source)
        lanes = [source.choice(streams)[0], source.choice(streams)[1]] if number % 2 else streams[number % 500]
        outcome = received(lanes, steps)
        seen[outcome] = seen.get(outcome, 0) + 1
        if number % 100 == 0:
            memory_outside = np.concatenate([memory[:4000], memory[8000:]])
            assert (memory_outside == 0xA5).all(), number
    assert seen.keys() == {"done", "lost", "corrupt", "mismatch", "aborted"}, seen


def received(lanes: list[bytes], steps: list[tuple[int, int, int, int]]) -> str:
    links = _native.Links(0, 2)
    pairs = [socket.socketpair() for _ in lanes]
    for (ours, _), data in zip(pairs, lanes, strict=True):
        ours.send(data)
        ours.close()
    links.add_tcp(1, [theirs.detach() for _, theirs in pairs])
    try:
        links.run(steps, 1, 0, COUNT, "i32", "sum", 5.0, 256)
    except _native.Failure as failure:
        return failure.kind
    finally:
        links.close()
    return "done"
