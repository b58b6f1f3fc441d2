"""What links are measured with: swaps of bytes, and all-reduces inside hosts, through the engine.

They are operations like any other, in the order of all others, which the engine runs by plans made for the purpose. In
a swap every rank sends to its peer and receives from it, or does nothing. Reducing inside hosts is a hierarchical
all-reduce that leaves out what goes between hosts; on one host it is a direct one.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from argosy._native import Engine
from argosy.comm.schedule import COPY, SEND, Step
from argosy.comm.topology import Topology

# In the order of the native enums.
_ALL_REDUCE: Final = 0
_BROADCAST: Final = 3
_FLOATS: Final = 0
_BYTES: Final = 12
_DIRECT: Final = 0
_TRIAL: Final = 255  # a number that no algorithm has


class Trials:
    """`exchange` and `reduce_inside`, as `measure.py` calls them, over an engine."""

    def __init__(self, engine: Engine, topology: Topology, timeout_seconds: float) -> None:
        self._engine, self._timeout = engine, timeout_seconds
        self._one_host = len(topology.members()) == 1
        self._owners = min(len(members) for members in topology.members())
        self._memory = np.zeros(0, np.uint8)
        self._peer: int | None = -1
        self._shared = self._shared_bytes = 0

    def reduce_inside(self, size_bytes: int) -> float:
        """All-reduce `size_bytes` of shared memory among the ranks of each host; the seconds that it took."""
        if size_bytes != self._shared_bytes:
            self.close()
            if not self._one_host:
                self._engine.set_plan(_ALL_REDUCE, _TRIAL, 0, 1, self._owners, [])
            # Kept from one time to the next: what is timed is not the making of pages.
            self._shared, self._shared_bytes = self._engine.allocate(size_bytes), size_bytes
        return self._timed(_ALL_REDUCE, _FLOATS, self._shared, size_bytes // 4, _DIRECT if self._one_host else _TRIAL)

    def close(self) -> None:
        """Give back the shared memory."""
        if self._shared_bytes:
            self._engine.release(self._shared)
            self._shared_bytes = 0

    def exchange(self, peer: int | None, size_bytes: int) -> float:
        """Swap `size_bytes` with `peer`, or look on; the seconds that it took."""
        if peer != self._peer:
            steps = [] if peer is None else [Step(SEND, peer, 0, 1), Step(COPY, peer, 1, 1)]
            self._engine.set_plan(_BROADCAST, _TRIAL, 0, 2, 0, steps)
            self._peer = peer
        if len(self._memory) < 2 * size_bytes:
            self._memory = np.zeros(2 * size_bytes, np.uint8)
        address = int(self._memory.ctypes.data)
        return self._timed(_BROADCAST, _BYTES, address, 2 * size_bytes)

    def _timed(self, collective: int, dtype: int, address: int, count: int, algorithm: int = _TRIAL) -> float:
        begin = time.perf_counter()
        self._engine.run(collective, dtype, 0, algorithm, 0, address, address, count, self._timeout)
        return time.perf_counter() - begin
