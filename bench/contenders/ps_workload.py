"""What all parameter servers are given: who serves, where the others are, and batches of ids and of clicks.

Rank 0 is the server, in a host of its own where hosts are namespaces; the others are workers. Numpy alone, because a
peer's environment has no torch.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from serving import Operation, Seat

ROWS, SAMPLES, FIELDS, DIM, DENSE = 1_000_000, 4096, 26, 16, 13
LAYERS = (64, 32)  # of the deep part
BATCHES = 10  # of a timed run, in one go: what is still under way at its end is waited for
KEPT = 16  # different batches that a worker has
RATE = 0.01  # of learning
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class Clicks:
    """Batches of a click log, one after the other in the first dimension."""

    ids: Any
    dense: Any
    labels: Any


def ids_of(popularity: str, worker: int) -> Any:
    """Batches of ids below `ROWS`, uniform or as popular as Zipf's law has it: the k-th with 1 / k^1.1."""
    random = np.random.default_rng(1 + worker)
    shape = (KEPT, SAMPLES, FIELDS)
    if popularity == "uniform":
        return random.integers(0, ROWS, shape)
    share = np.cumsum(np.arange(1, ROWS + 1) ** -1.1)
    places = np.searchsorted(share, random.random(shape) * share[-1])
    return np.random.default_rng(0).permutation(ROWS)[places]  # popular rows are not neighbours


def clicks_of(popularity: str, worker: int) -> Clicks:
    """The same with dense features and labels."""
    random = np.random.default_rng(100 + worker)
    dense = random.standard_normal((KEPT, SAMPLES, DENSE), dtype=np.float32)
    labels = (random.random((KEPT, SAMPLES)) < 0.25).astype(np.float32)
    return Clicks(ids_of(popularity, worker), dense, labels)


def addresses(seat: Seat) -> list[str]:
    """An address for each rank, told by files: the crew's folder is seen from all namespaces."""
    with socket.socket() as probe:
        probe.bind((seat.host, 0))
        mine = f"{seat.host}:{probe.getsockname()[1]}"
    folder = Path(seat.socket).parent
    aside = folder / f"aside-{seat.rank}"
    aside.write_text(mine)
    aside.rename(folder / f"address-{seat.rank}")
    files = [folder / f"address-{rank}" for rank in range(seat.size)]
    end = time.monotonic() + PATIENCE_SECONDS
    while not all(file.exists() for file in files):
        if time.monotonic() > end:
            raise TimeoutError(f"rank {seat.rank}: no address of {[file.name for file in files if not file.exists()]}")
        time.sleep(0.01)
    return [file.read_text() for file in files]


def serves(wanted: dict[str, Any]) -> Operation:
    """What a rank does that only serves others: nothing that counts."""
    return Operation(lambda: None, lambda: None, tell=lambda: {"serves": 1})


def in_circles(batches: int) -> Callable[[], int]:
    """The number of the next batch."""
    number = -1

    def following() -> int:
        nonlocal number
        number = (number + 1) % batches
        return number

    return following
