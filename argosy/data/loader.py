"""The loader: the script's own DataLoader, with each worker given its share of every step.

Dataset, collate function, loading processes and the rest stay as the script has them; only the batch sampler is
replaced, by one that follows the `Plan`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from argosy.data.ahead import looking_ahead
from argosy.data.balance import Balance
from argosy.data.batches import BatchConfig, Epoch, Share
from argosy.data.cursor import Cursor, Position
from argosy.data.empty import STAND_INS, emptied
from argosy.data.pace import Pace
from argosy.data.plan import Plan


class Loader:
    """A worker's view of the script's DataLoader. Iterating it is one epoch.

    `epoch` counts the epochs begun and decides the order of the next one; set it to continue an earlier run.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        config: BatchConfig,
        workers: int,
        rank: int,
        cursor: Cursor,
        exchange: Callable[[float], list[float]] | None = None,
        told: Callable[[list[int]], None] | None = None,
    ) -> None:
        """`exchange` and `told` are for `balance`: see `Balance`."""
        refuse_unusable(loader)
        self.epoch = 0
        self._start = 0  # samples of the next epoch that an earlier run has trained on
        self._inside: tuple[int, int] | None = None  # the epoch begun last, if unfinished, and its samples handed out
        self._current: Epoch | None = None
        self._step = 0  # of the epoch under way
        self._script, self._cursor, self._accumulate = loader, cursor, config.accumulate
        self._plan = Plan(loader, config, workers, rank)
        self._balance: Balance | None = None
        if config.balance and workers > 1:
            if exchange is None:
                raise TypeError("balance=true needs `exchange`, by which the workers tell each other their speeds")
            self._balance = Balance(workers, prefetched(loader), cursor, exchange, told)
        self._order = {"seed": config.seed}
        if hasattr(loader.dataset, "__len__"):  # a script's own sampler may do without
            self._order["dataset"] = len(loader.dataset)
        self._pace = Pace(cursor.common)
        self._sampler = _EpochSampler()
        self._inner = with_batch_sampler(loader, self._sampler)
        self._plan.epoch(0, 0)  # a sampler that cannot be divided says so now, not in the middle of a job

    @property
    def arithmetic(self) -> str:
        """How the script's batch became the job's, in one line; with `balance`, by the shares of the present."""
        return self._plan.arithmetic(self._balance.newest() if self._balance is not None else None)

    @property
    def batch_sizes(self) -> tuple[int, int] | None:
        """The script's batch and the whole job's; None if a sampler of the script's decides."""
        return self._plan.batch_sizes()

    @property
    def global_batch(self) -> int | None:
        """How large the step in hand is, or the next one between epochs, unless the epoch ends in it."""
        if self._current is not None:
            batch = self._current.batch(self._step)
        else:
            batch = self._plan.epoch(self.epoch, self._start).batch(0)
        return batch * self._accumulate if batch is not None else None

    def steps_in(self, epochs: int) -> int:
        """How many steps the first epochs of a run have."""
        return sum(-(-len(self._plan.epoch(number)) // self._accumulate) for number in range(epochs))

    def outline(self) -> list[str]:
        """What must be the same on all workers."""
        return self._plan.outline()

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint keeps: the epoch, and how many of its samples are trained, the batch in hand included.

        An epoch that was broken off is continued; iterating the loader again begins the next one instead. The order
        of samples hangs on the seed and on the number of samples, so these are kept beside.
        """
        number, samples = self._inside or (self.epoch, self._start)
        return {"epoch": number, "samples": samples, **self._order}

    def check_state_dict(self, state: dict[str, int]) -> None:
        """Refuse to continue in the middle of an epoch whose samples came in another order than they would here."""
        there = {name: state.get(name, here) for name, here in self._order.items()}  # older checkpoints have neither
        if state["samples"] and there != self._order:
            saved, here = (
                ", ".join(f"{name}={value}" for name, value in each.items()) for each in (there, self._order)
            )
            raise ValueError(
                f"the loader was saved {state['samples']} samples into an epoch ({saved}), and here it has ({here}): "
                f"samples would be left out or come twice; give the same data and seed={there['seed']}, or load the "
                f"checkpoint without the loader, which then begins an epoch"
            )

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where an earlier run was, on however many workers: after the samples that it has trained on."""
        self.check_state_dict(state)
        self.epoch, self._start = state["epoch"], state["samples"]

    def __len__(self) -> int:
        """Steps of the epoch under way or, between epochs, of the next one."""
        return len(self._current or self._plan.epoch(self.epoch, self._start))

    def __iter__(self) -> Iterator[Any]:
        for meet in self._cursor.between_loops:
            meet()
        number, handed = self.epoch, self._start
        shares = self._balance.begin() if self._balance is not None else None
        epoch = self._plan.epoch(number, handed, shares)
        self.epoch, self._start = number + 1, 0
        self._sampler.epoch = self._current = epoch
        self._step = 0
        self._inside = (number, handed) if handed else None
        seen, begun = 0, self._cursor.clock()
        try:
            for step, (share, batch) in enumerate(
                zip(epoch, looking_ahead(self._inner, self._cursor.coming), strict=True)
            ):
                handed += len(share.step)
                self._step = step
                merged, closes = (len(share.step), True) if self._accumulate == 1 else self._merged(epoch, step)
                if closes:  # what was added up of an unfinished step is in no checkpoint
                    self._inside = (number, handed) if step + 1 < len(epoch) else None
                if self._pace.passes():
                    continue
                samples = len(share.indices)
                seen += samples
                self._cursor.move(
                    self,
                    Position(
                        number,
                        step,
                        len(epoch),
                        samples,
                        len(share.step),
                        merged,
                        closes,
                        step % self._accumulate == 0,
                        share.is_even,
                    ),
                )
                yield batch if share.indices else emptied(batch)
                if self._balance is not None and shares is not None:
                    seconds = self._cursor.clock() - begun
                    self._balance.stepped(shares, step, len(share.indices), len(share.step), seconds)
                    begun = self._cursor.clock()
            self._pace.end()
            # Only here, and not below: a worker that breaks off or fails is not where the others are.
            for meet in self._cursor.between_loops:
                meet()
        finally:
            # `_inside` stays: a script that breaks off and then saves is to continue there.
            self._pace.break_off()
            self._current = None
            self._cursor.leave(self, seen)

    def _merged(self, epoch: Epoch, step: int) -> tuple[int, bool]:
        """How many samples are in the optimizer's step that a batch belongs to, and whether the batch closes it."""
        first = step - step % self._accumulate
        end = min(first + self._accumulate, len(epoch))
        return sum(len(epoch.steps[number]) for number in range(first, end)), step + 1 == end

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # ours, and not there yet: an object that is being copied has nothing to ask
            raise AttributeError(name)
        return getattr(self._script, name)


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


def prefetched(loader: DataLoader[Any]) -> int:
    """How many batches a DataLoader has asked for beyond the one that it has handed out."""
    return loader.num_workers * (loader.prefetch_factor or 0)


def with_batch_sampler(loader: DataLoader[Any], sampler: Iterable[list[Any]]) -> DataLoader[Any]:
    """The script's DataLoader, with other batches."""
    if not loader.in_order:
        warnings.warn("in_order=False is not kept: shares and batches must come in the same order", stacklevel=5)
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
    )


def refuse_unusable(loader: DataLoader[Any]) -> None:
    """Refuse a DataLoader whose samples cannot be divided exactly once."""
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError(
            f"{type(loader.dataset).__name__} is an IterableDataset: its samples have no index, so they cannot be "
            f"divided exactly once among workers; give a dataset with __getitem__ and __len__"
        )
    if loader.batch_sampler is None:
        raise TypeError("DataLoader(batch_size=None) makes no batches to divide; give it a batch_size")
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise TypeError(
            f"{type(loader).__name__} has an __iter__ of its own, which Argosy cannot divide; give a plain DataLoader, "
            f"and do what its __iter__ does in the dataset, in collate_fn or in the loop"
        )
    inner = getattr(loader.batch_sampler, "sampler", None)
    if isinstance(loader.sampler, DistributedSampler) or isinstance(inner, DistributedSampler):
        raise TypeError("Argosy divides the data itself: give the DataLoader without its DistributedSampler")
