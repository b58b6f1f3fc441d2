"""The plan: which samples make each step of an epoch, from what the script's DataLoader says.

A DataLoader that shuffles gets Argosy's order, which depends on (seed, epoch, position) alone. Any other sampler, or
batch sampler, is drawn with all random states set from (seed, epoch), so that all workers draw the same.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from argosy.config import ConfigError
from argosy.data.batches import BatchConfig, Consecutive, Division, Epoch, Ramped, Steps, WholeBatches, arithmetic
from argosy.data.order import Indices, Shuffle, epoch_seed
from argosy.data.ramp import Ramp


class Plan:
    """The epochs of a DataLoader, as one worker of a job sees them."""

    def __init__(self, loader: DataLoader[Any], config: BatchConfig, workers: int, rank: int) -> None:
        # Where the script gave a batch sampler, the DataLoader's own batch_size and sampler are void.
        self._batches = cast(BatchSampler, loader.batch_sampler)
        self._config, self._workers, self._rank = config, workers, rank
        self._regular = type(self._batches) is BatchSampler
        self._ramp = Ramp.parse(config.ramp, config.accumulate)
        if self._ramp is not None:
            if not self._regular:
                fix = f"batches come from the script's {type(self._batches).__name__}, whose sizes are its own"
                raise ConfigError("ramp", config.ramp, fix)
            self._ramp.check(config.global_batch(self._batches.batch_size, workers), workers)
        if config.balance and not self._regular and config.batch == "per-worker":
            raise ConfigError(
                "balance",
                True,
                f"the script's {type(self._batches).__name__} makes whole batches, one for each worker, which cannot "
                f"follow the workers' speed; use batch=global, which divides them, a plain batch_size, or no balance",
            )

    def batch_sizes(self) -> tuple[int, int] | None:
        """The script's batch and that of a step of the whole job; None if a sampler of the script's decides."""
        if not self._regular:
            return None
        batch = self._config.global_batch(self._batches.batch_size, self._workers)
        return self._batches.batch_size, batch * self._config.accumulate

    def epoch(self, number: int, start: int = 0, division: Division | None = None) -> Epoch:
        """The steps of an epoch, from the first one after `start` samples. A script's own sampler is drawn anew."""
        if self._regular:
            return Epoch(self._consecutive(number, start), self._workers, self._rank, division)
        return self._sampled(number, start, division)

    def arithmetic(self, division: Division | None = None) -> str:
        """How the script's batch became the job's, in one line."""
        if not self._regular:
            return f"batches come from the script's {type(self._batches).__name__}, {len(self.epoch(0))} steps"
        batches = self._batches
        samples = self.order(0)[1]
        return arithmetic(self._config, batches.batch_size, self._workers, samples, batches.drop_last, division)

    def outline(self) -> list[str]:
        """What must be the same on all workers: the sums, and the first epoch if a sampler of the script's drew it."""
        drawn = not self._regular or self._function_of(self._batches.sampler, 0) is None
        return [self.arithmetic(), *(str(step) for step in self.epoch(0).steps if drawn)]

    def _consecutive(self, number: int, start: int) -> Steps:
        order, samples = self.order(number)
        batch, drop_last = self._config.global_batch(self._batches.batch_size, self._workers), self._batches.drop_last
        if self._ramp is not None:
            pieces = self._ramp.pieces(batch, samples, drop_last, number, start)
            if pieces is not None:
                return Ramped(order, pieces)
        return Consecutive(order, samples, batch, drop_last, start)

    def order(self, number: int) -> tuple[Callable[[Indices], Indices], int]:
        """What stands at each position of an epoch, and how many positions there are."""
        sampler: Any = self._batches.sampler
        function = self._function_of(sampler, number)
        if function is not None:
            return function, len(sampler)
        drawn = self._drawn(sampler, number)
        keys = np.empty(len(drawn), dtype=object)  # a sampler may yield any key, not only numbers
        keys[:] = drawn
        return keys.__getitem__, len(drawn)

    def _function_of(self, sampler: Any, number: int) -> Callable[[Indices], Indices] | None:
        """The function that a sampler's order is, if it is one that need not be drawn."""
        if type(sampler) is SequentialSampler:
            return lambda positions: positions
        if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) <= len(sampler.data_source):
            return Shuffle(len(sampler.data_source), self._config.seed, number)
        return None

    def _sampled(self, number: int, start: int, division: Division | None) -> Epoch:
        """Steps from the script's own batch sampler: one of its batches, divided, or one for every worker."""
        batches = [list(batch) for batch in self._drawn(self._batches, number)]
        before = itertools.accumulate((len(batch) for batch in batches), initial=0)
        rest = [batch for batch, done in zip(batches, before, strict=False) if done >= start]
        kind = WholeBatches if self._config.batch == "per-worker" else Epoch
        return kind(rest, self._workers, self._rank, division)

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
