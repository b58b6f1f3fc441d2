"""A job with a slow worker: what it trains in a second, with equal shares and with balanced ones.

The work is a sleep in proportion to samples, so that a slow worker can be had on any machine and measured on few cores.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader

from argosy.comm.group import Group
from argosy.data.batches import BatchConfig
from argosy.data.cursor import Cursor
from argosy.data.loader import Loader


@dataclass(frozen=True)
class Trained:
    """What one worker saw."""

    samples_per_second: float  # of the whole job
    shares: list[list[int]]  # every time they changed
    seen: list[int]
    arithmetic: str


def train(
    group: Group, balance: bool, steps: int, batch: int = 32, sample_seconds: float = 0.0005, slowness: float = 3.0
) -> Trained:
    """Train `steps` steps; the last rank needs `slowness` times as long for a sample as the others."""
    shares: list[list[int]] = []

    def exchange(number: float) -> list[float]:
        return [float(told) for told in group.all_gather(torch.tensor([number], dtype=torch.float64))]

    cursor = Cursor()
    script = DataLoader(range(steps * batch * group.size), batch, shuffle=True)
    config = BatchConfig(balance=balance)
    loader = Loader(script, config, group.size, group.rank, cursor, exchange, shares.append)
    mine = sample_seconds * (slowness if group.rank == group.size - 1 else 1)
    seen: list[int] = []
    group.barrier()
    begun = time.perf_counter()
    for samples in loader:
        time.sleep(mine * len(samples))
        with cursor.waiting():  # what a reducer does when backward has ended
            group.barrier()
        seen += samples.tolist()
    rate = steps * batch * group.size / (time.perf_counter() - begun)
    return Trained(rate, shares, seen, loader.arithmetic)
