"""What the tests of the loader share: jobs whose workers each have a loader of their own."""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    Sampler,
)

from argosy.data.batches import BatchConfig
from argosy.data.cursor import Cursor
from argosy.data.loader import Loader

Mode = Literal["per-worker", "global"]
Make = Callable[[], DataLoader[Any]]
Steps = list[list[Any]]


def alone(script: DataLoader[Any], cursor: Cursor | None = None) -> Loader:
    return Loader(script, BatchConfig(), workers=1, rank=0, cursor=cursor or Cursor())


@contextmanager
def process_of(rank: int) -> Iterator[None]:
    """Random states as a worker's own process has them: unlike those of any other."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + rank)
        random.seed(1000 + rank)
        np.random.seed(1000 + rank)
        yield
    random.setstate(states[0])
    np.random.set_state(states[1])


class Job:
    """The loaders of all workers, each with its own DataLoader and random state."""

    def __init__(self, world: int, make: Make, mode: Mode = "per-worker", seed: int = 0, ramp: str = "none") -> None:
        self.loaders = []
        config = BatchConfig(batch=mode, seed=seed, ramp=ramp)
        for rank in range(world):
            with process_of(rank):
                self.loaders.append(Loader(make(), config, world, rank, Cursor()))

    def shares(self) -> list[list[Any]]:
        """One epoch: by rank, by step, what the worker is given."""
        shares = []
        for rank, loader in enumerate(self.loaders):
            with process_of(rank):
                shares.append(list(loader))
        return shares

    def steps(self) -> Steps:
        """One epoch: by step, the samples of all workers in the order of ranks."""
        return [[x for share in step for x in share.tolist()] for step in zip(*self.shares(), strict=True)]

    def set_epoch(self, epoch: int) -> None:
        for loader in self.loaders:
            loader.epoch = epoch


def flat(steps: Steps) -> list[Any]:
    return list(itertools.chain.from_iterable(steps))


class Keys(Sampler[Any]):
    """Yields keys that are no numbers."""

    def __init__(self, keys: list[Any]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[Any]:
        return (self.keys[number] for number in torch.randperm(len(self.keys)).tolist())

    def __len__(self) -> int:
        return len(self.keys)


class Buckets(Sampler[list[int]]):
    """Batches of samples that belong together, such as sentences of one length."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


UNEQUAL = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9]]
