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

_BUFFERS: Final = 3  # torch keeps one gathered module, and asks for the next while it still has that


def exchange_in_memory(modules: Sequence[FSDPModule], mesh: DeviceMesh) -> None:
    """Let sharded modules exchange parameters and gradients in shared memory, if their workers have any in common."""
    group = mesh.get_group("shard")
    if isinstance(group, ArgosyProcessGroup) and mesh.device_type == "cpu" and group.size() > 1:
        engine = group.engine
        if engine.on_one_host:
            gather, reduce = CommonGather(engine), OpenReduce(engine)
            for module in modules:
                module.set_custom_all_gather(gather)
                module.set_custom_reduce_scatter(reduce)


@dataclass
class _Buffer:
    address: int
    size_bytes: int
    taken: bool = False
    settled: bool = True  # whether all workers have let go of it: what was free when they last met

    def tensor(self, elements: int, dtype: torch.dtype) -> Tensor:
        """A tensor in the buffer, which is taken as long as anybody has the tensor."""
        memory = (ctypes.c_char * (elements * dtype.itemsize)).from_address(self.address)
        self.taken, self.settled = True, False
        weakref.finalize(memory, self._free).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=elements)

    def _free(self) -> None:
        self.taken = False


class CommonGather(AllGather):
    """An all-gather whose result stands once for all workers.

    Whether a buffer can be had is the same on all workers, as they do the same in the same order. One that was let go
    since they last met may still be read by others.
    """

    def __init__(self, engine: EngineGroup) -> None:
        self._engine = engine
        self._buffers: list[_Buffer] = []

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Where parameters are gathered."""
        elements = math.prod(size)
        size_bytes = elements * dtype.itemsize
        large = [each for each in self._buffers if each.size_bytes >= size_bytes]
        fit = [each for each in large if each.settled]
        if not fit and size_bytes and len(large) < _BUFFERS:
            self._buffers.append(_Buffer(self._engine.common(size_bytes), size_bytes))
            fit = self._buffers[-1:]
        if not fit:  # a script gathers many modules at once
            return torch.empty(elements, dtype=dtype, device=device)
        return min(fit, key=lambda each: each.size_bytes).tensor(elements, dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Meet: this worker's part is where it belongs already."""
        if all(each.address != output_tensor.data_ptr() for each in self._buffers):
            return cast("dist.Work | None", dist.all_gather_single(output_tensor, input_tensor, group, async_op))
        let_go = [each for each in self._buffers if not each.taken]
        self._engine.barrier()
        for each in let_go:
            each.settled = True
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
