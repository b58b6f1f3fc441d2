"""The memory limit: what the machine's processes can read and write together, in the pattern of an all-reduce.

With two ranks and n bytes, whoever reduces a half reads it from both buffers and writes the sum to both: each process
reads n bytes and writes n bytes, and no all-reduce that leaves the result in both buffers can move less. The ways to
move as much, without a peer to wait for:

- "add": two streams are read and both are written, in blocks that stay in the first caches, as an all-reduce does it;
- "scale": one buffer of n bytes is read and written in place;
- "copy": n bytes are read and n others written, by memcpy, which may pass the caches by.

The limit is the fastest of them. Processes start when the benchmark tells them, some 50 us apart, and make many
passes; what counts is how fast they are together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from serving import Operation, Seat, serve

BLOCK = (
    32 * 1024
)  # numbers; two blocks of 128 KiB fit in the second cache, and numpy's own cost per call is lost in them


def make(wanted: dict[str, Any]) -> Operation:
    count = wanted["bytes"] // 4
    buffers = [
        np.zeros(size, dtype=np.float32)
        for size in {"add": [count // 2] * 2, "scale": [count]}.get(wanted["way"], [count] * 2)
    ]
    for buffer in buffers:
        buffer[:] = 1.0  # zeros are pages that do not exist yet

    def add() -> None:
        one, two = buffers
        for begin in range(0, len(one), BLOCK):
            part = slice(begin, begin + BLOCK)
            np.add(one[part], two[part], out=one[part])
            two[part] = one[part]

    def scale() -> None:
        np.negative(buffers[0], out=buffers[0])

    def copy() -> None:
        np.copyto(buffers[1], buffers[0])

    return Operation({"add": add, "scale": scale, "copy": copy}[wanted["way"]], prepare=lambda: None)


serve(Seat.from_arguments(), make)
