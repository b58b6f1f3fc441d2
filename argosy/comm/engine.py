"""The engine's group: collectives over shared memory inside a host and TCP between hosts, run in native code.

    group = EngineGroup.join(store, rank, size, config=CommConfig(), secret=secret)
    bucket = group.empty(1_000_000)            # in memory that all ranks of the host map: reduced where it is
    group.all_reduce(bucket)
    pending = group.all_reduce(other, wait=False)
    pending.wait()

Tensors are contiguous and on the CPU. Every member calls the same operations in the same order; a member that calls
another one gets an error that names both, and so do its peers. A failure breaks the group: what comes after it fails
with the same reason. `abort` breaks it on purpose; a process then joins another group, with whoever is left.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import closing
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from argosy._native import Engine, EngineError
from argosy.comm import shared
from argosy.comm.config import CommConfig
from argosy.comm.elements import OPS, as_it_is, check_sizes, movable, reducible
from argosy.comm.errors import Aborted, CommError, Corrupted, DeadlinePassed, Mismatch, PeerLost
from argosy.comm.group import Group, Op
from argosy.comm.measure import measure
from argosy.comm.pending import DONE, Pending
from argosy.comm.plans import DIRECT, NUMBERS, make_plan
from argosy.comm.rendezvous import Meeting, meet
from argosy.comm.schedule import Collective
from argosy.comm.select import Selector, links_event
from argosy.comm.started import Posted, Started
from argosy.comm.topology import Topology
from argosy.comm.trials import Trials
from argosy.control.secret import Secret

# In the order of the native enum.
(_ALL_REDUCE, _REDUCE_SCATTER, _ALL_GATHER, _BROADCAST, _REDUCE, _GATHER, _SCATTER, _ALL_TO_ALL, _BARRIER) = range(9)
# A barrier is an all-reduce of next to nothing. Gathering, scattering and all-to-all need no plan.
_PLANNED = {
    _ALL_REDUCE: Collective.ALL_REDUCE,
    _REDUCE_SCATTER: Collective.REDUCE_SCATTER,
    _ALL_GATHER: Collective.ALL_GATHER,
    _BROADCAST: Collective.BROADCAST,
    _REDUCE: Collective.REDUCE,
    _BARRIER: Collective.ALL_REDUCE,
}
_TOLD_BYTES = (1 << 10, 1 << 13, 1 << 16, 1 << 20, 1 << 23, 1 << 26)
_NOTHING = torch.empty(0)


class EngineGroup(Group):
    """Workers that share memory, or are connected by TCP, or some of each."""

    def __init__(self, engine: Engine, rank: int, meeting: Meeting, config: CommConfig) -> None:
        self.rank, self.size = rank, len(meeting.hosts)
        self.hosts = meeting.hosts
        self.host_names = meeting.names
        self._engine = engine
        self.timeout_seconds = config.timeout_seconds
        self.selector = Selector(Topology(meeting.hosts), config.algorithm)
        self._one_host = len(set(meeting.hosts)) == 1
        self._forced = config.algorithm
        self._direct = self._one_host and self._forced in ("auto", DIRECT)
        self._planned: set[tuple[int, int, int]] = set()
        # A forked child must not keep the connections open that this process's death is to end.
        alive = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forsake(alive()))
        # Threads that still wait when the interpreter ends come back before it does.
        weakref.finalize(self, engine.drop)

    @classmethod
    def join(
        cls,
        store: Store,
        rank: int,
        size: int,
        *,
        config: CommConfig,
        secret: Secret | None,
        host_id: str | None = None,
        name: str = "",
    ) -> EngineGroup:
        """Come together with the other ranks at a store; `name` tells the group from others at the same store."""
        engine = Engine(rank, size)
        meeting = meet(
            engine,
            PrefixStore(f"argosy/{name}", store),
            rank,
            size,
            secret=secret,
            host_id=host_id,
            sockets=config.sockets,
            deadline_seconds=config.timeout_seconds,
        )
        group = cls(engine, rank, meeting, config)
        try:
            engine.start()
        except EngineError as error:
            group._raise(error)
        if not group._direct:
            group.measure_links()
        return group

    def measure_links(self) -> Topology:
        """Time the links together with all other members; from now on algorithms are chosen for what was found."""

        def gather(values: list[float]) -> list[list[float]]:
            return [row.tolist() for row in self.all_gather(torch.tensor(values, dtype=torch.float64))]

        if self.size > 1:
            trials = Trials(self._engine, self.selector.topology, self.timeout_seconds)
            with closing(trials):
                topology = measure(self.rank, self.hosts, trials.exchange, trials.reduce_inside, gather)
            self.selector = Selector(topology, self._forced)
        return self.selector.topology

    def findings(self) -> list[tuple[str, dict[str, Any]]]:
        """The links as measured, and for some sizes the algorithm that is chosen, with the reason."""
        told = [("links", links_event(self.selector.topology))]
        for size_bytes in _TOLD_BYTES:
            choice = self.selector.choose(Collective.ALL_REDUCE, size_bytes)
            told.append(("algorithm", choice.event(Collective.ALL_REDUCE, size_bytes)))
        return told

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor in memory that all ranks of the host map, filled with zeros; it is given back with the tensor."""
        return shared.empty(self._engine, shape, dtype)

    @property
    def on_one_host(self) -> bool:
        """Whether all members share memory."""
        return self._one_host

    def common(self, size_bytes: int) -> int:
        """The address of memory that is the same for all members, who are on one host and all ask for it.

        It is rank 0's, and stays until rank 0 leaves the group.
        """
        offset = torch.tensor([shared.offset(self._engine, size_bytes) if self.rank == 0 else 0])
        self.broadcast(offset)
        return shared.address(self._engine, int(offset), size_bytes)

    def all_reduce(self, tensor: Tensor, op: Op = "sum", *, wait: bool = True) -> Pending:
        """Replace `tensor` on every member by the members' tensors combined."""
        pointer = tensor.data_ptr()
        return self._run(wait, _ALL_REDUCE, reducible(tensor, op), OPS[op], 0, pointer, pointer, tensor)

    def all_reduced(self, tensor: Tensor, op: Op) -> bool:
        """The same by the shortest way; False, and nothing has happened, if the tensor cannot be reduced as it is."""
        dtype = as_it_is(tensor, op) if self._direct else None
        if dtype is None:
            return False
        pointer = tensor.data_ptr()
        try:
            self._engine.run(_ALL_REDUCE, dtype, OPS[op], 0, 0, pointer, pointer, tensor.numel(), self.timeout_seconds)
        except EngineError as error:
            self._raise(error)
        return True

    def broadcast(self, tensor: Tensor, root: int = 0, *, wait: bool = True) -> Pending:
        """Replace `tensor` on every member by that of `root`."""
        self._check_rank(root)
        pointer = tensor.data_ptr()
        return self._run(wait, _BROADCAST, movable(tensor), 0, root, pointer, pointer, tensor)

    def reduce(self, tensor: Tensor, root: int = 0, op: Op = "sum", *, wait: bool = True) -> Pending:
        """Replace `tensor` on `root` by the members' tensors combined; the others keep theirs."""
        self._check_rank(root)
        pointer = tensor.data_ptr()
        return self._run(wait, _REDUCE, reducible(tensor, op), OPS[op], root, pointer, pointer, tensor)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all members, by rank. They have the same shape and type."""
        gathered = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype)
        self.all_gather_into(gathered, tensor)
        return list(gathered.unbind(0))

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, wait: bool = True) -> Pending:
        """Fill `out` with the tensors of all members, one after the other, by rank."""
        check_sizes("out", out, tensor, self.size)
        return self._run(wait, _ALL_GATHER, movable(tensor), 0, 0, tensor.data_ptr(), out.data_ptr(), tensor, out)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, op: Op = "sum", *, wait: bool = True) -> Pending:
        """Combine the members' tensors, cut the result into as many parts as there are ranks; `out` is this one's."""
        check_sizes("tensor", tensor, out, self.size)
        dtype = reducible(tensor, op)
        return self._run(wait, _REDUCE_SCATTER, dtype, OPS[op], 0, tensor.data_ptr(), out.data_ptr(), out, tensor)

    def gather(self, out: Tensor | None, tensor: Tensor, root: int = 0, *, wait: bool = True) -> Pending:
        """Fill `out` on `root` with the tensors of all members, by rank; the others give None for it."""
        self._check_rank(root)
        pointer = 0
        if self.rank == root:
            if out is None:
                raise ValueError("gather: the root gives the tensor that is filled, and it is None")
            check_sizes("out", out, tensor, self.size)
            pointer = out.data_ptr()
        return self._run(wait, _GATHER, movable(tensor), 0, root, tensor.data_ptr(), pointer, tensor, out)

    def scatter(self, out: Tensor, tensor: Tensor | None, root: int = 0, *, wait: bool = True) -> Pending:
        """Fill `out` on every member with its part of the root's `tensor`; the others give None for it."""
        self._check_rank(root)
        pointer = 0
        if self.rank == root:
            if tensor is None:
                raise ValueError("scatter: the root gives the tensor that is handed out, and it is None")
            check_sizes("tensor", tensor, out, self.size)
            pointer = tensor.data_ptr()
        return self._run(wait, _SCATTER, movable(out), 0, root, pointer, out.data_ptr(), out, tensor)

    def all_to_all(
        self,
        out: Tensor,
        tensor: Tensor,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        *,
        wait: bool = True,
    ) -> Pending:
        """Send a part of `tensor` to every member, and fill `out` with what they send; splits are in elements."""
        if out.dtype != tensor.dtype:
            raise ValueError(f"all_to_all: out is {out.dtype} and the tensor {tensor.dtype}; they must be the same")
        if max(out.data_ptr(), tensor.data_ptr()) < min(t.data_ptr() + t.nbytes for t in (out, tensor)):
            raise ValueError("all_to_all: out and the tensor share memory; give it another tensor to fill")
        sizes = [self._split_bytes("out", out, out_splits), self._split_bytes("tensor", tensor, in_splits)]
        # What each pair exchanges may differ, so the ranks compare the splits instead of one count.
        return self._start(
            wait, _ALL_TO_ALL, movable(tensor), 0, 0, tensor.data_ptr(), out.data_ptr(), 0, (tensor, out), *sizes[::-1]
        )

    def send(self, tensor: Tensor, to: int, tag: int = 0, *, wait: bool = True) -> Pending:
        """Send a tensor to one rank, which receives it with the same tag. Small ones are done before it does."""
        return self._post(True, tensor, to, tag, wait)

    def receive(self, tensor: Tensor, source: int | None = None, tag: int = 0, *, wait: bool = True) -> Pending:
        """Fill `tensor` with what `source`, or anybody, sends with this tag; `Pending.source` then tells who."""
        return self._post(False, tensor, source, tag, wait)

    def _post(self, sending: bool, tensor: Tensor, peer: int | None, tag: int, wait: bool) -> Pending:
        if self.size == 1:
            raise ValueError("this group has one rank: there is nobody to send to, or to receive from")
        if not 0 <= tag < 1 << 63:
            raise ValueError(f"tag={tag}: a tag is 0 or more")
        if peer is not None and (not 0 <= peer < self.size or peer == self.rank):
            raise ValueError(f"rank {peer} is no peer of rank {self.rank}: messages go to another rank of {self.size}")
        number = -1 if peer is None else peer
        size_bytes = tensor.numel() * tensor.itemsize
        try:
            delivery = self._engine.post(
                sending, number, tag, movable(tensor), tensor.data_ptr(), size_bytes, self.timeout_seconds, tensor
            )
        except EngineError as error:
            self._raise(error)
        posted = Posted(self._engine, delivery, self._raise)
        if wait:
            posted.wait()
        return posted

    def barrier(self, *, wait: bool = True) -> Pending:
        """Return when every member has called this."""
        return self._run(wait, _BARRIER, 0, 0, 0, 0, 0, _NOTHING)

    def abort(self, reason: str) -> None:
        """Fail all operations, running and to come, on every member: the group is of no use any more."""
        self._engine.abort(f"rank {self.rank} aborted the group: {reason}")

    def close(self) -> None:
        """Leave the group, after the operations that were started. Calling it twice is harmless."""
        self._engine.close()

    def drop(self) -> None:
        """Leave the group at once: operations under way fail."""
        self._engine.drop()

    def _run(
        self,
        wait: bool,
        collective: int,
        dtype: int,
        op: int,
        root: int,
        source: int,
        target: int,
        counted: Tensor,
        other: Tensor | None = None,
    ) -> Pending:
        if not wait:
            kept = (counted, other)
            return self._start(wait, collective, dtype, op, root, source, target, counted.numel(), kept, [], [])
        try:
            count = counted.numel()
            algorithm = 0 if self._direct else self._algorithm(collective, root, count * counted.itemsize)
            self._engine.run(collective, dtype, op, algorithm, root, source, target, count, self.timeout_seconds)
        except EngineError as error:
            self._raise(error)
        return DONE

    def _start(
        self,
        wait: bool,
        collective: int,
        dtype: int,
        op: int,
        root: int,
        source: int,
        target: int,
        count: int,
        kept: tuple[Tensor | None, ...],
        in_bytes: list[int],
        out_bytes: list[int],
    ) -> Pending:
        size_bytes = count * kept[0].itemsize if kept[0] is not None else 0
        algorithm = 0 if self._direct else self._algorithm(collective, root, size_bytes)
        try:
            ticket = self._engine.submit(
                collective,
                dtype,
                op,
                algorithm,
                root,
                source,
                target,
                count,
                self.timeout_seconds,
                in_bytes,
                out_bytes,
                kept,
            )
        except EngineError as error:
            self._raise(error)
        started = Started(self._engine, ticket, self._raise)
        if wait:
            started.wait()
            return DONE
        return started

    def _algorithm(self, collective: int, root: int, size_bytes: int) -> int:
        """The number of the algorithm for an operation; the engine has its plan when this returns."""
        name = self._choose(collective, size_bytes)
        number = NUMBERS[name]
        if name != DIRECT and collective in _PLANNED and (collective, number, root) not in self._planned:
            kind = _PLANNED[collective]
            slots, owners, steps = make_plan(kind, name, self.selector.topology, root, self.rank)
            self._engine.set_plan(collective, number, root, slots, owners, steps)
            self._planned.add((collective, number, root))
        return number

    def _choose(self, collective: int, size_bytes: int) -> str:
        if collective not in _PLANNED:
            return DIRECT if self._one_host else "pairwise"
        if collective == _BARRIER:
            return "tree"
        # The cost model counts the bytes that all ranks have together where each has a part.
        parts = self.size if collective in (_REDUCE_SCATTER, _ALL_GATHER) else 1
        return self.selector.choose(_PLANNED[collective], size_bytes * parts).name

    def _raise(self, error: Exception) -> NoReturn:
        """Raise what the native engine told, as an error that says who, where, in what and why."""
        kind, peer, sequence, operation, text = error.args
        host = self.host_names[self.rank]
        message = f"{operation}, #{sequence}, failed on rank {self.rank} of {self.size} (host {host}): {text}"
        known = 0 <= peer < self.size
        if known and peer != self.rank and kind in ("lost", "timeout"):
            message += f" [rank {peer} is on host {self.host_names[peer]}]"
        if kind in ("lost", "timeout"):
            where = self.host_names[peer] if known else "unknown"
            lost = PeerLost if kind == "lost" else DeadlinePassed
            raise lost(message, peer, where, operation, sequence) from None
        plain: dict[str, type[CommError]] = {"mismatch": Mismatch, "aborted": Aborted, "corrupt": Corrupted}
        raise plain[kind](message) from None

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not in this group of {self.size}")

    def _split_bytes(self, name: str, tensor: Tensor, splits: Sequence[int] | None) -> list[int]:
        movable(tensor)
        elements = tensor.numel()
        if splits is None:
            if elements % self.size:
                raise ValueError(f"all_to_all: {name} has {elements} elements, which {self.size} ranks cannot share")
            splits = [elements // self.size] * self.size
        if len(splits) != self.size or min(splits) < 0 or sum(splits) != elements:
            raise ValueError(f"all_to_all: {name} has {elements} elements, and its splits are {list(splits)}")
        return [split * tensor.itemsize for split in splits]


def _forsake(group: EngineGroup | None) -> None:
    if group is not None:
        group._engine.forsake()
