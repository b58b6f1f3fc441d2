"""The loader: the script's own DataLoader, with each worker given its share of every step.

Dataset, collate function, loading processes and the rest stay as the script has them; only the batch sampler is
replaced. A DataLoader that shuffles gets Argosy's order, which depends on (seed, epoch, position) alone; any other
sampler is drawn with the random state set from (seed, epoch), so that all workers draw the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from argosy.data.batches import BatchConfig, Consecutive, Epoch, Share, WholeBatches, arithmetic
from argosy.data.cursor import Cursor, Position
from argosy.data.empty import STAND_INS, emptied
from argosy.data.order import Indices, Shuffle, epoch_seed


class Loader:
    """A worker's view of the script's DataLoader. Iterating it is one epoch.

    `epoch` counts the epochs begun and decides the order of the next one; set it to continue an earlier run.
    """

    def __init__(self, loader: DataLoader[Any], config: BatchConfig, workers: int, rank: int, cursor: Cursor) -> None:
        _refuse_unusable(loader)
        self.epoch = 0
        self._script, self._config = loader, config
        self._workers, self._rank, self._cursor = workers, rank, cursor
        self._sampler = _EpochSampler()
        self._inner = _with_batch_sampler(loader, self._sampler)
        self._made: tuple[int, Epoch] | None = None
        self._epoch_of(self.epoch)  # a sampler that cannot be divided says so now, not in the middle of a job

    @property
    def arithmetic(self) -> str:
        """How the script's batch became the job's, in one line."""
        if not self._regular:
            return f"batches come from the script's {type(self._script.batch_sampler).__name__}, {len(self)} steps"
        _, samples = self._order(self.epoch)
        batches = self._batches
        return arithmetic(self._config, batches.batch_size, self._workers, samples, batches.drop_last)

    def outline(self) -> list[str]:
        """What must be the same on all workers: the sums, and the first epoch if a sampler of the script's drew it."""
        keys = [str(step) for step in self._epoch_of(self.epoch).steps] if self._draws else []
        return [self.arithmetic, *keys]

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps: the epochs begun."""
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the epochs of an earlier run."""
        self.epoch = state["epoch"]

    def __len__(self) -> int:
        return len(self._epoch_of(self.epoch))

    def __iter__(self) -> Iterator[Any]:
        number, self.epoch = self.epoch, self.epoch + 1
        epoch = self._epoch_of(number)
        self._sampler.epoch = epoch
        outside, seen = self._cursor.at, 0
        try:
            for step, (share, batch) in enumerate(zip(epoch, self._inner, strict=True)):
                seen += len(share.indices)
                self._cursor.move(Position(number, step, len(epoch), len(share.indices), len(share.step)))
                yield batch if share.indices else emptied(batch)
        finally:
            self._cursor.leave(outside, seen)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # ours, and not there yet: an object that is being copied has nothing to ask
            raise AttributeError(name)
        return getattr(self._script, name)

    @property
    def _regular(self) -> bool:
        """Whether the script's batches are simply consecutive samples."""
        return type(self._script.batch_sampler) is BatchSampler

    @property
    def _batches(self) -> BatchSampler:
        """The batch sampler: where the script gave one, the DataLoader's own batch_size and sampler are void."""
        return cast(BatchSampler, self._script.batch_sampler)

    @property
    def _draws(self) -> bool:
        """Whether the order comes from a sampler of the script's, and not from a function."""
        return not self._regular or type(self._batches.sampler) not in (SequentialSampler, RandomSampler)

    def _epoch_of(self, number: int) -> Epoch:
        if self._made is None or self._made[0] != number:
            self._made = number, self._consecutive(number) if self._regular else self._sampled(number)
        return self._made[1]

    def _consecutive(self, number: int) -> Epoch:
        order, samples = self._order(number)
        batch = self._config.global_batch(self._batches.batch_size, self._workers)
        return Epoch(Consecutive(order, samples, batch, self._batches.drop_last), self._workers, self._rank)

    def _order(self, number: int) -> tuple[Callable[[Indices], Indices], int]:
        """What stands at each position of an epoch, and how many positions there are."""
        sampler: Any = self._batches.sampler
        if type(sampler) is SequentialSampler:
            return _identity, len(sampler)
        if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) <= len(sampler.data_source):
            return Shuffle(len(sampler.data_source), self._config.seed, number), len(sampler)
        drawn = self._drawn(sampler, number)
        keys = np.empty(len(drawn), dtype=object)  # a sampler may yield any key, not only numbers
        keys[:] = drawn
        return keys.__getitem__, len(drawn)

    def _sampled(self, number: int) -> Epoch:
        """Steps from the script's own batch sampler: one of its batches, divided, or one for every worker."""
        batches = [list(batch) for batch in self._drawn(self._script.batch_sampler, number)]
        kind = WholeBatches if self._config.batch == "per-worker" else Epoch
        return kind(batches, self._workers, self._rank)

    def _drawn(self, sampler: Any, number: int) -> list[Any]:
        """All that a sampler yields, with the random state a function of seed and epoch."""
        seed = epoch_seed(self._config.seed, number) >> 1
        with seeded(seed):
            holders: list[Any] = [sampler, getattr(sampler, "sampler", None)]
            for holder in holders:
                generator = getattr(holder, "generator", None)
                if isinstance(generator, torch.Generator):
                    generator.manual_seed(seed)
                if hasattr(holder, "set_epoch"):
                    holder.set_epoch(number)
            return list(sampler)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run the block with all random states set from a seed, and set them back."""
    python, array = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % (1 << 32))
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)


class _EpochSampler:
    """The batch sampler that replaces the script's: this worker's share of each step of the present epoch."""

    epoch: Epoch

    def __iter__(self) -> Iterator[list[Any]]:
        return (self._loadable(share) for share in self.epoch)

    def __len__(self) -> int:
        return len(self.epoch)

    @staticmethod
    def _loadable(share: Share) -> list[Any]:
        # A DataLoader cannot load nothing: an empty share loads stand-ins, and the loader cuts them off again.
        return list(share.indices) or [share.step[0]] * STAND_INS


def _identity(positions: Indices) -> Indices:
    return positions


def _with_batch_sampler(loader: DataLoader[Any], sampler: _EpochSampler) -> DataLoader[Any]:
    return DataLoader(
        loader.dataset,
        batch_sampler=cast(Any, sampler),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
        in_order=loader.in_order,
    )


def _refuse_unusable(loader: DataLoader[Any]) -> None:
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            f"{type(loader.dataset).__name__} is an IterableDataset: its samples have no index, so they cannot be "
            f"divided exactly once among workers; give a dataset with __getitem__ and __len__"
        )
    if loader.batch_sampler is None:
        raise TypeError("DataLoader(batch_size=None) makes no batches to divide; give it a batch_size")
    inner = getattr(loader.batch_sampler, "sampler", None)
    if isinstance(loader.sampler, DistributedSampler) or isinstance(inner, DistributedSampler):
        raise TypeError("Argosy divides the data itself: give the DataLoader without its DistributedSampler")
