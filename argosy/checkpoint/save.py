"""Saving: what the ranks hold is divided into files, and written now or by a thread while training goes on.

A save in the background works on a copy of what this rank writes, made before `save` returns, and agrees with the other
ranks through a group of its own: the order of operations of the job's group belongs to the training thread.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from argosy.checkpoint import tree
from argosy.checkpoint.agree import gather, together
from argosy.checkpoint.errors import CheckpointError
from argosy.checkpoint.pieces import Pieces, pieces_of
from argosy.checkpoint.plan import describe, plan
from argosy.checkpoint.shard import Entry
from argosy.checkpoint.steps import step_of
from argosy.checkpoint.storage import parent, storage_at
from argosy.checkpoint.write import Planning, key_of, snapshot, write
from argosy.comm.engine import EngineGroup
from argosy.comm.group import Group


class Saver:
    """Saves the checkpoints of one job, one at a time. `second` joins another group of the same workers."""

    def __init__(self, group: Group, second: Callable[[], Group]) -> None:
        self._group, self._join_second = group, second
        self._second: Group | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(
        self,
        path: str | Path,
        states: dict[str, Any],
        *,
        step: int,
        strategy: str = "",
        keep: int | None = None,
        wait: bool = True,
        lowest_only: tuple[str, ...] = (),
    ) -> None:
        """Write the states of named objects as one checkpoint.

        Of the objects in `lowest_only` the ranks hold different values, and the lowest rank's are written.
        """
        self.finish()
        planning = self._plan(path, states, step, strategy, keep, lowest_only)
        if wait:
            write(planning, self._group)
            if self._group.rank == 0:  # in nobody's time, and before the next one
                self._start(planning.storage.sweep)
            return
        if self._second is None:
            self._second = self._join_second()
        copies, self._buffer = snapshot(planning.mine, self._buffer)
        planning = Planning(**{**vars(planning), "mine": copies})
        self._start(self._write, planning, self._second)

    def finish(self) -> None:
        """Wait for what is done in the background, if anything is, and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """The same, and leave."""
        try:
            self.finish()
        finally:
            if self._second is not None:
                self._second.close()
                self._second = None

    def drop(self) -> None:
        """Leave at once: a save in the background does not become a checkpoint, and its error is nobody's any more."""
        if isinstance(self._second, EngineGroup):
            self._second.drop()
        self._second = self._thread = None

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        def run() -> None:
            try:
                work(*arguments)
            except BaseException as error:  # it is raised where the work is waited for
                self._failure = error

        self._thread = threading.Thread(target=run, name="argosy checkpoint", daemon=True)
        self._thread.start()

    def _write(self, planning: Planning, group: Group) -> None:
        write(planning, group)
        if group.rank == 0:
            planning.storage.sweep()

    def _plan(
        self,
        path: str | Path,
        states: dict[str, Any],
        step: int,
        strategy: str,
        keep: int | None,
        lowest_only: tuple[str, ...],
    ) -> Planning:
        tensors: dict[str, dict[str, Pieces]] = {}
        forms: dict[str, Any] = {}
        described: dict[str, Any] = {}

        def take_apart() -> list[str]:
            _check(path, step, keep)
            storage_at(path)  # an unknown kind of URL is refused on all
            for role, state in states.items():
                found: dict[str, Any] = {}
                forms[role] = tree.split(state, found, role)
                tensors[role] = {name: pieces_of(tensor, name) for name, tensor in found.items()}
                described[role] = describe(tensors[role])
            return list(states)

        told = together(self._group, take_apart)
        for rank, roles in enumerate(told):
            if roles != told[0]:
                raise CheckpointError(f"rank {rank} saves {', '.join(roles)}, and rank 0 {', '.join(told[0])}")
        planned, parts, mine = {}, {}, []
        for role in states:
            parts[role] = reduce(tree.merge, _distinct(gather(self._group, forms[role])))
            named: set[str] = set()
            tree.join(parts[role], named.add)
            everywhere = gather(self._group, described[role])
            for name, tensor in plan(everywhere, lambda _, role=role: role in lowest_only).items():  # type: ignore[misc]
                if name not in named:  # it stands where a lower rank has something else, which is what counts
                    continue
                planned[name] = tensor
                for box, rank in tensor.boxes:
                    if rank == self._group.rank:
                        mine.append(Entry(key_of(name, box, tensor.shape), tensors[role][name].view(box)))
        number, most = operator.index(step), operator.index(keep) if keep is not None else None
        return Planning(storage_at(path), number, strategy, most, parts, planned, mine)


def _distinct(forms: list[Any]) -> list[Any]:
    return list({id(form): form for form in forms}.values())


def _check(path: str | Path, step: int, keep: int | None) -> None:
    if not _is_number(step, 0):
        raise CheckpointError(f"step={step!r}: expected a whole number, 0 or more")
    if keep is not None and not _is_number(keep, 1):
        raise CheckpointError(f"keep={keep!r}: expected how many checkpoints to keep, 1 or more, or None for all")
    if step_of(parent(path)[1]) is not None:
        raise CheckpointError(f"{path} is the name of one step's checkpoint; give the folder that is to hold the steps")


def _is_number(value: Any, least: int) -> bool:
    """Whether it is a whole number, numpy's included."""
    return hasattr(value, "__index__") and not isinstance(value, bool) and operator.index(value) >= least
