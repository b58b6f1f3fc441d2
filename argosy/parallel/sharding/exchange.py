"""How FSDP2 gathers parameters and reduces gradients among workers that share memory.

torch lets each worker gather into a buffer of its own, and reduce from one. Here what is gathered stands once, for all
of the workers: each copies its part into the common buffer, they meet, and each copies what it needs out. Gradients
are written where the others can read them, and each worker sums its own part of all. Nothing passes through a window,
the buffers are kept from one module to the next, and with four workers the common one takes a quarter of the memory.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from argosy.comm.backend import ArgosyProcessGroup
from argosy.comm.engine import EngineGroup
from argosy.comm.errors import Mismatch

_BUFFERS: Final = 3  # torch keeps one gathered module, and asks for the next while it still has that


_exchanges: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[CommonGather, OpenReduce]] = weakref.WeakKeyDictionary()


def exchange_in_memory(modules: Sequence[FSDPModule], mesh: DeviceMesh) -> None:
    """Let sharded modules exchange parameters and gradients in shared memory, if their workers have any in common."""
    group = mesh.get_group("shard")
    if isinstance(group, ArgosyProcessGroup) and mesh.device_type == "cpu" and group.size() > 1:
        engine = group.engine
        if engine.on_one_host:
            if group not in _exchanges:
                _exchanges[group] = CommonGather(engine), OpenReduce(engine)
            gather, reduce = _exchanges[group]
            for module in modules:
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(reduce)


@dataclass
class _Buffer:
    address: int
    size_bytes: int
    taken: bool = False
    settled: bool = True  # whether all workers had let go of it when they last met

    def tensor(self, elements: int, dtype: torch.dtype) -> Tensor:
        """A tensor in the buffer, which is taken as long as anybody has the tensor."""
        memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(self.address)
        self.taken, self.settled = True, False
        weakref.finalize(memory, self._free).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=elements)

    def _free(self) -> None:
        self.taken = False


class CommonGather(AllGather):
    """An all-gather whose result stands once for all workers. One for each group of workers: modules share buffers.

    [Note: one meeting]
    Each worker has copied its part into a buffer; when all have met, the parts are there. At the meeting they also
    compare which buffer and how much, lest workers that are not in the same module read each other's; and they learn
    which buffers nobody has in use any more. Only those are used again, so that all workers choose the same one, and
    none is written while somebody still reads it, however long anybody keeps a tensor.
    """

    def __init__(self, engine: EngineGroup) -> None:
        self._engine = engine
        self._buffers: list[_Buffer] = []

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Where parameters are gathered."""
        elements = math.prod(size)
        size_bytes = elements * dtype.itemsize
        if not size_bytes:
            return torch.empty(0, dtype=dtype, device=device)
        room = 1 << (size_bytes - 1).bit_length()  # of which only what is used exists
        alike = [each for each in self._buffers if each.size_bytes == room]
        buffer = next((each for each in alike if each.settled), None)
        if buffer is None and len(alike) < _BUFFERS:
            buffer = _Buffer(self._engine.common(room), room)
            self._buffers.append(buffer)
        if buffer is None:  # a script gathers many modules at once
            return torch.empty(elements, dtype=dtype, device=device)
        return buffer.tensor(elements, dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Meet: this worker's part is where it belongs already."""
        at = next((i for i, each in enumerate(self._buffers) if each.address == output_tensor.data_ptr()), None)
        if at is None or not (isinstance(group, ArgosyProcessGroup) and group.engine is self._engine):
            return cast("dist.Work | None", dist.all_gather_single(output_tensor, input_tensor, group, async_op))
        elements = output_tensor.numel()
        told = torch.tensor([at, -at, elements, -elements, *(each.taken for each in self._buffers)], dtype=torch.int64)
        self._engine.all_reduce(told, "max")
        most, least, largest, smallest, *taken = told.tolist()
        if (most, largest) != (-least, -smallest):
            raise Mismatch(
                f"workers gather different modules: rank {self._engine.rank} one of {elements} elements, others of "
                f"{-smallest} to {largest}; all workers of a sharded model run the same modules in the same order"
            )
        for each, is_taken in zip(self._buffers, taken, strict=True):
            each.settled = not is_taken
        return None


class OpenReduce(ReduceScatter):
    """A reduce-scatter from memory that all workers can read. It returns when nobody reads any more."""

    def __init__(self, engine: EngineGroup) -> None:
        self._engine = engine
        self._kept = torch.empty(0, dtype=torch.uint8)
        self._asked = False

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """First what is to be reduced, then, for the same operation, where the result belongs."""
        elements = math.prod(size)
        size_bytes = elements * dtype.itemsize
        if self._asked or not elements:
            return torch.empty(elements, dtype=dtype, device=device)
        self._asked = True
        if self._kept.numel() < size_bytes:
            self._kept = self._engine.empty(size_bytes, dtype=torch.uint8)
        return self._kept[:size_bytes].view(dtype)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce."""
        self._asked = False
        return cast("dist.Work | None", dist.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op))
