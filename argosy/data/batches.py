"""Batches: which samples make a step of the whole job, and each worker's share of them.

An epoch is a list of steps. A step is what one process would train on at once; it is the same for any number of
workers that gives the same global batch. The workers divide it: contiguous shares, as equal as can be, the lower
ranks holding one more where it does not come out even (or shares that follow speed: `balance.py`). Nothing is padded,
repeated or dropped (unless the script's own DataLoader says `drop_last`), so the last step may be short, and a worker's
share of it empty.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from argosy.config import Config, ConfigError
from argosy.data.order import Indices
from argosy.data.ramp import Piece, Ramp


@dataclass(frozen=True)
class BatchConfig(Config):
    """What the script's batch size means, the seed of the order of samples, and whether batches begin smaller.

    `per-worker`: each worker takes batches as large as the script's, so the global batch grows with the workers.
    `global`: the workers divide the script's batch, so the job computes what one process would.
    `ramp`: the global batch begins with a part of its size: `ramp=4:3epochs` with a quarter, whole after 3 epochs.
    `accumulate`: so many batches make one step; gradients are added up, and an optimizer's steps between do nothing.
    `balance`: faster workers take more of each step's samples, as many as their measured speed allows.
    """

    batch: Literal["per-worker", "global"] = "per-worker"
    seed: int = 0
    accumulate: int = 1
    ramp: str = "none"
    balance: bool = False

    def check(self) -> None:
        """Refuse a seed that does not fit 64 bits, a step of no batch, and a ramp that cannot be read."""
        if self.accumulate < 1:
            raise ConfigError("accumulate", self.accumulate, "a step is made of 1 batch or more")
        if not 0 <= self.seed < 1 << 63:
            raise ConfigError("seed", self.seed, "a seed lies between 0 and 2^63 - 1")
        Ramp.parse(self.ramp)

    def global_batch(self, script_batch: int, workers: int) -> int:
        """Samples in one step of the whole job."""
        if self.batch == "per-worker":
            return script_batch * workers
        if script_batch < workers:
            raise ConfigError(
                "batch",
                self.batch,
                f"the script's batch of {script_batch} cannot be divided among {workers} workers; "
                f"use at most {script_batch} workers, a larger batch_size, or batch=per-worker",
            )
        return script_batch


@dataclass(frozen=True)
class Share:
    """What one worker holds of one step.

    `indices` is empty where the step has fewer samples than the job has workers; `step` is the whole job's part.
    `is_even` if all workers have the same number.
    """

    indices: Sequence[Any]
    step: Sequence[Any]
    is_even: bool


def share_bounds(samples: int, workers: int, rank: int) -> tuple[int, int]:
    """Where a worker's part of `samples` begins and ends.

    >>> [share_bounds(10, 4, rank) for rank in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    size, extra = divmod(samples, workers)
    begin = rank * size + min(rank, extra)
    return begin, begin + size + (rank < extra)


class Steps(Sequence[list[int]]):
    """The steps of an epoch whose sizes are ours to choose."""

    @abstractmethod
    def batch(self, step: int) -> int:
        """How large a step is unless the epoch ends in it."""


class Division(Protocol):
    """How the workers divide the steps of an epoch."""

    def bounds(self, step: int, samples: int, rank: int) -> tuple[int, int]:
        """Where a worker's part of a step's samples begins and ends."""
        ...


class Equal:
    """Shares as equal as can be."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def bounds(self, step: int, samples: int, rank: int) -> tuple[int, int]:
        """The same in every step."""
        return share_bounds(samples, self._workers, rank)


class Consecutive(Steps):
    """Steps of `batch` consecutive positions each, looked up in an order; none is stored."""

    def __init__(
        self, order: Callable[[Indices], Indices], samples: int, batch: int, drop_last: bool, start: int = 0
    ) -> None:
        self._order = order
        stop = samples - (samples - start) % batch if drop_last else samples
        self._begins = range(start, stop, batch)

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, step: Any) -> Any:
        begin = self._begins[step]
        return self._order(np.arange(begin, min(begin + self._begins.step, self._begins.stop))).tolist()

    def batch(self, step: int) -> int:  # noqa: D102
        return self._begins.step


class Ramped(Steps):
    """Steps of consecutive positions, of the sizes that a ramp gives them."""

    def __init__(self, order: Callable[[Indices], Indices], pieces: Sequence[Piece]) -> None:
        self._order, self._pieces = order, pieces

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, step: Any) -> Any:
        piece = self._pieces[step]
        return self._order(np.arange(piece.begin, piece.end)).tolist()

    def batch(self, step: int) -> int:  # noqa: D102
        return self._pieces[step].batch


class Epoch:
    """The steps of one epoch, as one worker sees them."""

    def __init__(
        self, steps: Sequence[Sequence[Any]], workers: int, rank: int, division: Division | None = None
    ) -> None:
        self.steps, self._workers, self._rank = steps, workers, rank
        self._division = division or Equal(workers)

    def __len__(self) -> int:
        return len(self.steps)

    def batch(self, step: int) -> int | None:
        """How large a step is unless the epoch ends in it; None if a sampler of the script's decides."""
        return self.steps.batch(step) if isinstance(self.steps, Steps) and step < len(self) else None

    def __iter__(self) -> Iterator[Share]:
        for number in range(len(self.steps)):
            step = self.steps[number]
            bounds = [self._division.bounds(number, len(step), rank) for rank in range(self._workers)]
            begin, end = bounds[self._rank]
            yield Share(step[begin:end], step, len({end - begin for begin, end in bounds}) == 1)


class WholeBatches(Epoch):
    """Steps of whole batches, one for each worker while there are any: what belongs together stays together."""

    def __init__(
        self, batches: Sequence[Sequence[Any]], workers: int, rank: int, division: Division | None = None
    ) -> None:
        assert division is None, "whole batches are not divided"
        self._groups = [batches[begin : begin + workers] for begin in range(0, len(batches), workers)]
        super().__init__([[key for batch in group for key in batch] for group in self._groups], workers, rank)

    def __iter__(self) -> Iterator[Share]:
        for group, step in zip(self._groups, self.steps, strict=True):
            is_even = len(group) == self._workers and len({len(batch) for batch in group}) == 1
            yield Share(group[self._rank] if self._rank < len(group) else [], step, is_even)


def arithmetic(
    config: BatchConfig,
    script_batch: int,
    workers: int,
    samples: int,
    drop_last: bool,
    division: Division | None = None,
) -> str:
    """The sums behind a job's batches, in one line for the user.

    >>> arithmetic(BatchConfig(), script_batch=64, workers=4, samples=1000, drop_last=False)
    'global batch 256 = 64 per worker x 4 data; an epoch of 1000 samples = 3 steps of 256 + 1 of 232'
    >>> arithmetic(BatchConfig(batch="global"), script_batch=10, workers=4, samples=20, drop_last=False)
    'global batch 10 = 3 + 3 + 2 + 2 per worker (batch=global); an epoch of 20 samples = 2 steps of 10'
    >>> arithmetic(BatchConfig(accumulate=2), script_batch=64, workers=4, samples=1000, drop_last=False)
    'global batch 512 = 64 per worker x 4 data x 2 accumulated; an epoch of 1000 samples = 1 step of 512 + 1 of 488'
    """
    batch = config.global_batch(script_batch, workers)
    bounds = [(division or Equal(workers)).bounds(0, batch, rank) for rank in range(workers)]
    sizes = [end - begin for begin, end in bounds]
    if len(set(sizes)) == 1:
        sum_line = f"{batch // workers} per worker x {workers} data"
    else:
        sum_line = " + ".join(map(str, sizes)) + " per worker"
    sum_line += f" x {config.accumulate} accumulated" if config.accumulate > 1 else ""
    sum_line += " (batch=global)" if config.batch == "global" else ""
    sum_line += " (by speed)" if division is not None else ""
    dropped = samples % batch if drop_last else 0
    total = batch * config.accumulate
    whole, rest = divmod(samples - dropped, total)
    parts = [f"{whole} step{'s' if whole > 1 else ''} of {total}"] if whole else []
    parts += [f"1 of {rest}"] if rest else []
    parts += [f"{dropped} dropped (drop_last)"] if dropped else []
    ramp = Ramp.parse(config.ramp, config.accumulate)
    return (
        f"global batch {total} = {sum_line}; an epoch of {samples} samples = {' + '.join(parts) or '0 steps'}"
        f"{'; ' + ramp.told(batch) if ramp else ''}"
    )
