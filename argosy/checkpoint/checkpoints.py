"""The checkpoints of a job: the facade's save, load and export come here.

Beside the objects that the script names, a checkpoint with an optimizer keeps what goes on with it: the step, the
random numbers of each rank, and what the strategy's parts remember (`extra`). They come back when an optimizer is
loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from torch import nn
from torch.optim import Optimizer

from argosy.checkpoint.agree import on_first
from argosy.checkpoint.export import export
from argosy.checkpoint.parts import load_parts, state_of
from argosy.checkpoint.random_state import random_state
from argosy.checkpoint.read import open_checkpoint
from argosy.checkpoint.save import Saver
from argosy.checkpoint.steps import is_there
from argosy.comm.group import Group

EXTRA: Final = "training"  # what a checkpoint calls what the strategy's parts remember
RANDOM: Final = "random"


class Remembers(Protocol):
    """Something beside the script's objects that has a state. All workers call both, and the states are the same."""

    def state_dict(self) -> dict[str, Any]:
        """What is remembered; empty if nothing is."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; from nothing, if it is empty."""

    def forget(self, models: Sequence[nn.Module]) -> None:
        """These models have other parameters than those that something is remembered of."""


class Checkpoints:
    """Saves and loads for one job. `second` joins another group of the same workers, for saves in the background."""

    def __init__(self, group: Group, second: Callable[[], Group], strategy: str, extra: Remembers) -> None:
        self._group, self._strategy, self._extra = group, strategy, extra
        self._saver = Saver(group, second)

    def save(
        self,
        path: str | Path,
        parts: Mapping[str, Any],
        models: Sequence[nn.Module],
        *,
        step: int,
        wait: bool = True,
        keep: int | None = None,
        alike: bool = True,
    ) -> list[str]:
        """Write a checkpoint of named objects; returns the names of all that is in it.

        `models` are those that parameters have their names from. Unless the ranks' optimizers are `alike`, rank 0's
        is written.
        """
        states = {role: state_of(part, models) for role, part in parts.items()}
        optimizers = tuple(role for role, part in parts.items() if isinstance(part, Optimizer))
        if optimizers and (extra := self._extra.state_dict()):
            states[EXTRA] = extra
        states[RANDOM] = {self._group.rank: random_state()}
        self._saver.save(
            path,
            states,
            step=step,
            strategy=self._strategy,
            keep=keep,
            wait=wait,
            lowest_only=() if alike else optimizers,
        )
        return [role for role in states if role != RANDOM]

    def are_at(self, path: str | Path) -> bool:
        """Whether there is a checkpoint, whole or damaged: as rank 0 sees it, on all workers."""
        self._saver.finish()
        return bool(on_first(self._group, lambda: is_there(path)))

    def load(self, path: str | Path, parts: Mapping[str, Any], models: Sequence[nn.Module]) -> int | None:
        """Read a checkpoint into named objects; returns the step to go on from, if an optimizer is among them."""
        self._saver.finish()
        opened = open_checkpoint(path, self._group)
        goes_on = any(isinstance(part, Optimizer) for part in parts.values())
        wanted = dict(parts)
        if goes_on and EXTRA in opened.manifest.parts:
            wanted[EXTRA] = self._extra
        load_parts(opened, wanted, models, random_of=self._group.rank if goes_on else None)
        if not goes_on:
            self._extra.forget([part for part in parts.values() if isinstance(part, nn.Module)])
        elif EXTRA not in wanted:
            self._extra.load_state_dict({})
        return opened.manifest.step if goes_on else None

    def export(self, path: str | Path, model: nn.Module) -> None:
        """Write one plain safetensors file."""
        export(path, model, self._group)

    def finish(self) -> None:
        """Wait for the save in the background, and raise its error."""
        self._saver.finish()

    def close(self) -> None:
        """The same, and leave."""
        self._saver.close()

    def drop(self) -> None:
        """Leave at once, because the job has failed: a save in the background ends without a word."""
        self._saver.drop()
