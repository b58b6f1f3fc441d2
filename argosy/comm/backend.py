"""The torch.distributed backend `argosy`: torch's collectives on Argosy's engine.

After `argosy.register_backend()`, `dist.init_process_group("argosy")` makes a group whose operations run on the
engine, so that DDP, FSDP2, DTensor, the pipelining schedules and anyone's own code run on it. The path of a call:
torch's Python function, or its C++ -> `ArgosyProcessGroup` -> (`staging.py`: contiguous tensors) -> `EngineGroup`.

An operation that is not asynchronous runs in the calling thread and has ended when it returns; an asynchronous one
returns a `Work` (`work.py`). Tensors on a GPU go to an NCCL group. That path is not covered by the tests, which run on
machines without one.
"""

# torch's type hints list overloads that neither its Python nor its C++ calls.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ProcessGroup,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
    Work,
)

from argosy.comm import staging
from argosy.comm.config import CommConfig
from argosy.comm.engine import EngineGroup
from argosy.comm.staging import OPS, dense, only, put_back, reducible, room
from argosy.comm.torch_group import NAME, TorchGroup
from argosy.comm.work import ENDED, StartedWork, as_one
from argosy.control.secret import Secret


def register_backend() -> None:
    """Make the backend known to torch.distributed. Calling it twice is harmless.

    >>> import os, torch, torch.distributed as dist
    >>> register_backend()
    >>> dist.init_process_group("argosy", store=dist.HashStore(), rank=0, world_size=1)
    >>> total = torch.ones(3)
    >>> dist.all_reduce(total)
    >>> total
    tensor([1., 1., 1.])
    >>> dist.destroy_process_group()
    """
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu"])


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """What torch calls on each member of a new group."""
    secret = os.environ.get("ARGOSY_SECRET")
    engine = EngineGroup.join(
        store,
        rank,
        size,
        config=CommConfig(timeout_seconds=timeout.total_seconds()),
        secret=Secret.from_hex(secret) if secret else None,
        host_id=os.environ.get("ARGOSY_HOST_ID") or None,
    )
    return ArgosyProcessGroup(store, engine, timeout)


class ArgosyProcessGroup(TorchGroup):
    """Workers that exchange tensors through the engine. Made by torch; see `register_backend`.

    Operations have torch's names and options. Those that torch's C++ calls are: allreduce, allreduce_coalesced,
    all_gather_single_coalesced, allgather, all_to_all_single, barrier, broadcast, reduce_scatter,
    reduce_scatter_single_coalesced, send and recv; it knows no others of a group that is written in Python.
    """

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        """Replace each rank's tensor by all of them combined."""
        if opts is None:
            opts = AllreduceOptions()
        # The short way, for what most calls are.
        if len(tensors) == 1 and self._waits(opts):
            number = opts.reduceOp.op.value
            if number < len(OPS) and self._engine.all_reduced(tensors[0], OPS[number]):
                return ENDED
        return self.allreduce_coalesced([only("all_reduce", tensors)], opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """The same for several tensors."""
        opts = opts or AllreduceCoalescedOptions()
        if elsewhere := self._elsewhere(tensors):
            return self._handed_over(elsewhere, "allreduce_coalesced", tensors, opts)
        ready = [reducible("all_reduce", tensor, opts.reduceOp) for tensor in tensors]
        parts = [self._engine.all_reduce(each.buffer, each.op, wait=self._waits(opts)) for each in ready]
        return self._several(parts, tensors, [each.dense for each in ready], opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Replace each rank's tensor by the root's."""
        opts = opts or BroadcastOptions()
        tensor = only("broadcast", tensors)
        if elsewhere := self._elsewhere(tensors):
            return self._handed_over(elsewhere, "broadcast", tensors, opts)
        body = dense("broadcast", tensor)
        pending = self._engine.broadcast(body, opts.rootRank, wait=self._waits(opts))
        return self._work(pending, tensors, opts, put_back(tensor, body))

    def reduce(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Replace the root's tensor by all ranks' combined; the others keep theirs."""
        opts = opts or ReduceOptions()
        tensor = only("reduce", tensors)
        if elsewhere := self._elsewhere(tensors):
            return self._handed_over(elsewhere, "reduce", tensors, opts)
        body, buffer, op = reducible("reduce", tensor, opts.reduceOp)
        pending = self._engine.reduce(buffer, opts.rootRank, op, wait=self._waits(opts))
        finish = put_back(tensor, body) if opts.rootRank == self._engine.rank else None
        return self._work(pending, tensors, opts, finish)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """Give every rank the tensors of all, in a list."""
        opts = opts or AllgatherOptions()
        if elsewhere := self._elsewhere(inputs):
            return self._handed_over(elsewhere, "allgather", outputs, inputs, opts)
        self._pairs("all_gather", outputs, inputs)
        parts, flats = [], []
        for places, tensor in zip(outputs, inputs, strict=True):
            staging.one_for_each("all_gather", self._size, tensor, places, "the output list")
            flats.append(tensor.new_empty(self._size * tensor.numel()))
            body = dense("all_gather", tensor)
            parts.append(self._engine.all_gather_into(flats[-1], body, wait=self._waits(opts)))
        everything = [place for places in outputs for place in places]
        return self._work(as_one(parts), everything, opts, staging.put_back_lists(outputs, flats))

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """The same for several tensors: `outputs[r][i]` is rank r's `inputs[i]`."""
        if len(outputs) != self._size or any(len(places) != len(inputs) for places in outputs):
            raise ValueError(
                f"all_gather_coalesced of {len(inputs)} tensors takes {self._size} lists of {len(inputs)} outputs, one "
                f"list for each rank; got lists of {[len(places) for places in outputs]}"
            )
        return self.allgather([list(places) for places in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Give every rank the tensors of all, one behind the other in one tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """The same for several tensors."""
        opts = opts or AllgatherOptions()
        self._pairs("all_gather_single", outputs, inputs)
        if elsewhere := self._elsewhere(inputs):
            return self._handed_over(elsewhere, "allgather_into_tensor_coalesced", outputs, inputs, opts)
        parts, places = [], []
        for output, tensor in zip(outputs, inputs, strict=True):
            staging.times("all_gather_single", self._size, output, tensor, ("output", "input"))
            places.append(room("all_gather_single", output))
            body = dense("all_gather_single", tensor)
            parts.append(self._engine.all_gather_into(places[-1], body, wait=self._waits(opts)))
        return self._several(parts, outputs, places, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        """Combine the lists of all ranks, and give each rank its own element."""
        opts = opts or ReduceScatterOptions()
        output, parts = only("reduce_scatter", outputs), inputs[0]
        if elsewhere := self._elsewhere(outputs):
            return self._handed_over(elsewhere, "reduce_scatter", outputs, inputs, opts)
        staging.one_for_each("reduce_scatter", self._size, output, parts, "the input list")
        return self.reduce_scatter_single(output, staging.flattened("reduce_scatter", parts), opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Combine the tensors of all ranks, and give each rank its part of the result."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """The same for several tensors."""
        opts = opts or ReduceScatterOptions()
        self._pairs("reduce_scatter_single", outputs, inputs)
        if elsewhere := self._elsewhere(inputs):
            return self._handed_over(elsewhere, "reduce_scatter_tensor_coalesced", outputs, inputs, opts)
        parts, places = [], []
        for output, tensor in zip(outputs, inputs, strict=True):
            staging.times("reduce_scatter_single", self._size, tensor, output, ("input", "output"))
            _, buffer, op = reducible("reduce_scatter_single", tensor, opts.reduceOp)
            place = room("reduce_scatter_single", output)
            places.append(place)
            into = torch.view_as_real(place) if place.is_complex() else place.view(buffer.dtype)
            parts.append(self._engine.reduce_scatter(into, buffer, op, wait=self._waits(opts)))
        return self._several(parts, outputs, places, opts)

    # Names that torch's Python still calls them by.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """Give the root the tensors of all ranks, in a list."""
        opts = opts or GatherOptions()
        tensor = only("gather", inputs)
        if elsewhere := self._elsewhere(inputs):
            return self._handed_over(elsewhere, "gather", outputs, inputs, opts)
        flat, finish, places = None, None, []
        if opts.rootRank == self._engine.rank:
            places = outputs[0]
            staging.one_for_each("gather", self._size, tensor, places, "the output list")
            flat = tensor.new_empty(self._size * tensor.numel())
            finish = staging.put_back_parts(places, flat)
        pending = self._engine.gather(flat, dense("gather", tensor), opts.rootRank, wait=self._waits(opts))
        return self._work(pending, places, opts, finish)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Work:
        """Give each rank its element of the root's list."""
        opts = opts or ScatterOptions()
        output = only("scatter", outputs)
        if elsewhere := self._elsewhere(outputs):
            return self._handed_over(elsewhere, "scatter", outputs, inputs, opts)
        flat = None
        if opts.rootRank == self._engine.rank:
            staging.one_for_each("scatter", self._size, output, inputs[0], "the input list")
            flat = staging.flattened("scatter", inputs[0])
        place = room("scatter", output)
        pending = self._engine.scatter(place, flat, opts.rootRank, wait=self._waits(opts))
        return self._work(pending, outputs, opts, put_back(output, place))

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Send `inputs[r]` to rank r, and receive `outputs[r]` from it."""
        opts = opts or AllToAllOptions()
        if elsewhere := self._elsewhere(inputs):
            return self._handed_over(elsewhere, "alltoall", outputs, inputs, opts)
        for what, tensors in (("outputs", outputs), ("inputs", inputs)):
            if len(tensors) != self._size:
                raise ValueError(f"all_to_all: {len(tensors)} {what}, and the group has {self._size} ranks")
        staging.same_kind("all_to_all", inputs[0], [*inputs, *outputs])
        counts = [tensor.numel() for tensor in outputs]
        flat = inputs[0].new_empty(sum(counts))
        pending = self._engine.all_to_all(
            flat,
            staging.flattened("all_to_all", inputs),
            counts,
            [tensor.numel() for tensor in inputs],
            wait=self._waits(opts),
        )
        return self._work(pending, outputs, opts, staging.put_back_parts(outputs, flat))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_rows: list[int],
        input_rows: list[int],
        opts: Any = None,
    ) -> Work:
        """The same for tensors that are cut along their first dimension, equally or as told."""
        opts = opts or AllToAllOptions()
        if elsewhere := self._elsewhere([input]):
            return self._handed_over(elsewhere, "alltoall_base", output, input, output_rows, input_rows, opts)
        staging.same_kind("all_to_all_single", input, [output])
        place = room("all_to_all_single", output)
        pending = self._engine.all_to_all(
            place,
            dense("all_to_all_single", input),
            staging.splits("all_to_all_single", self._size, output, output_rows, "output"),
            staging.splits("all_to_all_single", self._size, input, input_rows, "input"),
            wait=self._waits(opts),
        )
        return self._work(pending, [output], opts, put_back(output, place))

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> Work:
        """Return when every rank has called this."""
        opts = opts or BarrierOptions()
        if opts.device is not None and opts.device.type == "cuda":
            return self._handed_over(opts.device, "barrier", opts)
        return self._work(self._engine.barrier(wait=self._waits(opts)), [], opts)

    # Messages between two ranks. torch's Python waits for them if the caller wants to.

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Work:
        """Send a tensor to one rank."""
        tensor = only("send", tensors)
        if elsewhere := self._elsewhere(tensors):
            return self._handed_over(elsewhere, "send", tensors, to, tag)
        pending = self._engine.send(dense("send", tensor), to, tag, wait=False)
        return StartedWork(pending, tensors, self._watcher, None, None)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Work:
        """Receive a tensor from one rank."""
        if elsewhere := self._elsewhere(tensors):
            return self._handed_over(elsewhere, "recv", tensors, source, tag)
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Receive a tensor from whoever sends one with this tag."""
        if elsewhere := self._elsewhere(tensors):
            return self._handed_over(elsewhere, "recv_anysource", tensors, tag)
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: list[Tensor], source: int | None, tag: int) -> Work:
        tensor = only("recv", tensors)
        place = room("recv", tensor)
        pending = self._engine.receive(place, source, tag, wait=False)
        return StartedWork(pending, tensors, self._watcher, None, put_back(tensor, place))
