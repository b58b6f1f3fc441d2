"""What torch wants to know of a process group that is written in Python, and how its operations end.

`backend.py` adds the operations.
"""

# torch's type hints list overloads that neither its Python nor its C++ calls.
# mypy: disable-error-code="override"

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store, Work

from argosy.comm.engine import EngineGroup
from argosy.comm.errors import Aborted
from argosy.comm.monitored import monitored_barrier
from argosy.comm.pending import Pending
from argosy.comm.staging import Finish, in_turn, put_back
from argosy.comm.work import ENDED, StartedWork, Watcher, as_one

NAME: Final = "argosy"


class _Left:
    """In place of the engine, once the group is left."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def close(self) -> None:
        """Torch may shut a group down twice."""

    def all_reduced(self, *arguments: object) -> bool:
        """No short way is left."""
        return False

    def __getattr__(self, operation: str) -> NoReturn:
        raise Aborted(f"{operation}: this process has left the group; dist.destroy_process_group was called")


def _end(engine: EngineGroup, watcher: Watcher) -> None:
    """Before the interpreter ends, the watcher does: torch's futures abort a process that has none to return to."""
    engine.drop()
    watcher.close(patience_seconds=2)


class TorchGroup(ProcessGroup):
    """A group without operations. Made with the engine's group, which it leaves when torch destroys it."""

    def __init__(self, store: Store, engine: EngineGroup, timeout: timedelta) -> None:
        """`store` serves what the engine does not: monitored barriers and NCCL's start."""
        # Not the constructor with a store, which torch's type hints know: it cannot make what Python has derived.
        super().__init__(engine.rank, engine.size)  # type: ignore[call-arg]
        self._store = store
        self._engine = engine
        self._size = engine.size
        self._timeout = timeout
        self._watcher = Watcher(f"argosy futures of rank {engine.rank}")
        self._nccl: Any = None
        self._monitored = 0
        self._name, self._description = "", "undefined"
        self._at_exit = weakref.finalize(self, _end, engine, self._watcher)

    @property
    def engine(self) -> EngineGroup:
        """The engine's group of the same ranks."""
        return self._engine

    # Without the names, DeviceMesh and FSDP2 fail.

    def getBackendName(self) -> str:  # noqa: N802 - torch's C++ looks for these names
        """The name that the group was asked for by."""
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        """The name that torch finds the group by."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Called by torch once the group is made."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """What the group is for, in its maker's words."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Called by torch once the group is made."""
        self._description = description

    def get_group_store(self) -> Store:
        """The store that the group was made with."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """How long operations may wait for their peers from now on."""
        self._timeout = timeout
        self._engine.timeout_seconds = timeout.total_seconds()

    def abort(self) -> None:
        """Fail every operation of the group that is under way, here and on its peers."""
        self._engine.abort(f"rank {self._engine.rank} aborted the group")
        if self._nccl is not None:
            self._nccl.abort()

    def shutdown(self) -> None:
        """Leave the group; `dist.destroy_process_group` calls it."""
        self._engine.close()
        self._watcher.close()
        self._at_exit.detach()
        # DTensor's caches keep groups until the interpreter ends: not the engine, which is native, too.
        self._engine = cast(EngineGroup, _Left(self._engine.rank, self._size))
        if self._nccl is not None:
            self._nccl.shutdown()

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier whose error names the ranks that did not come: all of them, whatever `wait_all_ranks` says.

        `dist.monitored_barrier` refuses every backend but Gloo: call this method of the group.
        """
        self._monitored += 1
        keys = PrefixStore(f"monitored/{self._monitored}/", self._store)
        monitored_barrier(keys, self._engine.rank, self._size, timeout or self._timeout)

    def _start_coalescing(self, device: torch.device) -> None:
        raise NotImplementedError(
            "the argosy backend does not batch operations by device: use _coalescing_manager(group) without a device, "
            "or batch_isend_irecv"
        )

    # How an operation ends.

    def _waits(self, opts: Any) -> bool:
        """Whether the engine can run it to its end at once: nobody goes on meanwhile, and its deadline is the usual."""
        return not opts.asyncOp and opts.timeout.days < 0

    def _work(self, pending: Pending, tensors: list[Tensor], opts: Any, finish: Finish | None = None) -> Work:
        timeout_seconds = None if opts.timeout.days < 0 else opts.timeout.total_seconds() or None
        if opts.asyncOp:
            return StartedWork(pending, tensors, self._watcher, timeout_seconds, finish)
        if not self._waits(opts):
            pending.wait(timeout_seconds)
        if finish is not None:
            finish()
        return ENDED

    def _several(self, parts: Sequence[Pending], outputs: list[Tensor], places: list[Tensor], opts: Any) -> Work:
        """The work of operations whose results are in `places` and belong into `outputs`."""
        moves = [move for output, place in zip(outputs, places, strict=True) if (move := put_back(output, place))]
        return self._work(as_one(parts), outputs, opts, in_turn(moves))

    def _pairs(self, operation: str, outputs: Sequence[object], inputs: Sequence[object]) -> None:
        if len(outputs) != len(inputs):
            raise ValueError(
                f"{operation}: {len(inputs)} inputs and {len(outputs)} outputs: there must be one for each"
            )

    # Tensors on a GPU.

    def _elsewhere(self, tensors: Sequence[Tensor]) -> torch.device | None:
        """The device of tensors that are not in the CPU's memory."""
        return next((tensor.device for tensor in tensors if not tensor.is_cpu), None)

    def _handed_over(self, device: torch.device, operation: str, *arguments: Any) -> Work:
        """Have NCCL do it, in a group that is made when it is first needed."""
        if device.type != "cuda":
            raise ValueError(f"{operation}: the argosy backend takes tensors of the CPU and of GPUs, not of {device}")
        if self._nccl is None:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            store = PrefixStore("nccl/", self._store)
            self._nccl = dist.ProcessGroupNCCL(store, self._engine.rank, self._size, options)
        work: Work = getattr(self._nccl, operation)(*arguments)
        return work
