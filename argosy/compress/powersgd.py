"""PowerSGD: gradients as products of two thin matrices (Vogels, Karimireddy and Jaggi, 2019), with error feedback.

For the sum M of all workers' matrices, one step of power iteration, begun where the last training step ended:

    P = M Q        computed from each worker's own matrix, and summed over workers
    P = the columns of P, made orthonormal
    Q = M^T P      likewise
    M ~ P Q^T      what every worker has in the end

A worker keeps what its own matrix loses by this, M_r - P (M_r^T P)^T, and adds it to its next one. (Keeping M_r less an
equal part of the result, as is usual, has the same sum, but lets what tells the workers apart grow without end.)

The P of all matrices of a bucket are summed together, and so are their Q: two exchanges. Tensors of one dimension, and
those that are small or would not get smaller, travel whole beside the P: small matrices are a small part of what
travels, and lose as much by it as large ones. A tensor of more dimensions is a matrix of shape[0] rows.

Arithmetic that all workers do for themselves is in native code that has the same bits on every CPU.

[Note: taken out later]
Matrices are larger than caches, and every pass over one is paid for in memory traffic. What was sent of a worker's own
matrix, P (M_r^T P)^T, is two thin matrices: they are kept, and taken out when the next gradient is added, in one pass.

[Note: matrices that are not finite]
One number that is not finite makes P so, on all workers alike. They all fill that matrix with NaN, drop what they had
held back of it, and keep the Q they had.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from argosy._native import (
    low_rank_expand,
    low_rank_project,
    low_rank_project_back,
    low_rank_restart,
    low_rank_settle,
)
from argosy.comm.engine import EngineGroup
from argosy.comm.pending import Pending
from argosy.compress.codec import Bucket, Codec, Part
from argosy.compress.kept import Cuts, Residuals, Rooms, Scratch, address_of

MIN_ELEMENTS: Final = 16_384


@dataclass(frozen=True)
class _Sent:
    """What was sent of this worker's own matrix, and is still in what it has kept: see [Note: taken out later]."""

    p: Tensor
    q: Tensor


@dataclass(frozen=True)
class _Matrix:
    """A part that is sent as a product: where it is in the bucket, and its P and Q in what is sent."""

    part: Part
    shape: tuple[int, int, int]  # rows, columns, rank
    p: slice
    q: slice
    start: Tensor  # the Q to begin with
    sent: _Sent
    at_bytes: int
    p_bytes: int
    q_bytes: int


@dataclass(frozen=True)
class _Plan:
    """How a bucket travels: its matrices, and its other parts with their places behind the P of all matrices."""

    matrices: tuple[_Matrix, ...]
    dense: tuple[tuple[Part, slice], ...]
    p_numbers: int
    q_numbers: int


class PowerSgdCodec(Codec):
    """Sums gradients of `min_elements` or more as matrices of rank `rank`."""

    weighs = True

    def __init__(self, rank: int = 4, min_elements: int = MIN_ELEMENTS) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"rank={rank}: a rank is a whole number from 1 on")
        self._rank, self._min_elements = rank, min_elements
        self._starts: dict[str, Tensor] = {}  # for each matrix the Q to begin with, the same on all workers
        self._sent: dict[str, _Sent] = {}
        self._plans = Cuts(self._plan)
        self._residuals, self._scratch = Residuals(), Scratch()

    def suits(self, part: Part) -> bool:
        """Matrices that are smaller as a product."""
        return self._shape(part) is not None

    def steps(self, bucket: Bucket, group: EngineGroup) -> Iterator[Pending]:
        """One step of power iteration for each matrix: see above."""
        plan, flat = self._plans.of(bucket), bucket.flat
        if not plan.matrices:
            self.bytes_sent += flat.nbytes
            yield group.all_reduce(flat.mul_(bucket.weight), wait=False)
            return
        with self._scratch.lend(group) as rooms:
            yield from self._iterate(plan, bucket, rooms, group)

    def _iterate(self, plan: _Plan, bucket: Bucket, rooms: Rooms, group: EngineGroup) -> Iterator[Pending]:
        flat, share, residual = bucket.flat, address_of(bucket), self._residuals.of(bucket)
        p_sums = rooms.take("p", plan.p_numbers, torch.float32)
        q_sums = rooms.take("q", plan.q_numbers, torch.float32)
        own_qs = rooms.take("own q", plan.q_numbers, torch.float32)
        kept, p, q, own_q = (numbers.data_ptr() for numbers in (residual, p_sums, q_sums, own_qs))

        for m in plan.matrices:
            at, sent_p, sent_q = m.at_bytes, m.sent.p.data_ptr(), m.sent.q.data_ptr()
            start = m.start.data_ptr()
            low_rank_project(p + m.p_bytes, kept + at, sent_p, sent_q, share + at, bucket.weight, start, m.shape)
            m.sent.q.zero_()
        for part, place in plan.dense:
            torch.mul(flat[part.begin : part.end], bucket.weight, out=p_sums[place])
        yield group.all_reduce(p_sums, wait=False)
        lost = _drop_broken(plan.matrices, [m.p for m in plan.matrices], residual, p_sums)

        for m in plan.matrices:
            low_rank_project_back(own_q + m.q_bytes, kept + m.at_bytes, p + m.p_bytes, m.shape)
        q_sums.copy_(own_qs)
        yield group.all_reduce(q_sums, wait=False)
        lost += _drop_broken(plan.matrices, [m.q for m in plan.matrices], residual, q_sums, own_qs)

        for m in plan.matrices:
            m.sent.p.view(-1).copy_(p_sums[m.p])
            m.sent.q.view(-1).copy_(own_qs[m.q])
            low_rank_expand(share + m.at_bytes, p + m.p_bytes, q + m.q_bytes, m.shape)
            low_rank_restart(m.start.data_ptr(), q + m.q_bytes, m.shape)
        for part, place in plan.dense:
            flat[part.begin : part.end].copy_(p_sums[place])
        for part in lost:
            flat[part.begin : part.end].fill_(torch.nan)
        self.bytes_sent += p_sums.nbytes + q_sums.nbytes

    def _plan(self, bucket: Bucket) -> _Plan:
        matrices, dense = [], []
        p_end = q_end = 0
        for part in bucket.parts:
            shape = self._shape(part)
            if shape is None:
                dense.append(part)
                continue
            rows, columns, rank = shape
            p, q = slice(p_end, p_end + rank * rows), slice(q_end, q_end + rank * columns)
            start = self._start(part.name, rank, columns)
            sent = self._sent.setdefault(part.name, _Sent(torch.zeros(rank, rows), torch.zeros(rank, columns)))
            matrices.append(_Matrix(part, shape, p, q, start, sent, 4 * part.begin, 4 * p.start, 4 * q.start))
            p_end, q_end = p.stop, q.stop
        places, end = [], p_end
        for part in dense:
            places.append((part, slice(end, end + part.end - part.begin)))
            end += part.end - part.begin
        return _Plan(tuple(matrices), tuple(places), end, q_end)

    def _shape(self, part: Part) -> tuple[int, int, int] | None:
        """Rows, columns and rank of a part, if it is smaller that way."""
        if len(part.shape) < 2:
            return None
        rows, numbers = part.shape[0], part.end - part.begin
        columns = numbers // rows if rows else 0
        smaller = numbers >= self._min_elements and self._rank * (rows + columns) < numbers
        return (rows, columns, self._rank) if smaller else None

    def _start(self, name: str, rank: int, columns: int) -> Tensor:
        """The Q to begin with: where the last step ended, or anything, as long as all workers begin with the same."""
        start = self._starts.get(name)
        if start is None or start.shape != (rank, columns):
            random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            start = self._starts[name] = torch.randn(rank, columns, generator=random)
        return start

    def meet(self, name: str, parameter: nn.Parameter) -> None:
        """Of a parameter that is new nothing was held back or sent."""
        self._residuals.forget(name)
        self._sent.pop(name, None)
        self._starts.pop(name, None)
        self._plans.clear()

    def rescale(self, ratio: float) -> None:
        """What was held back is as large as it would have been."""
        self._settle()
        self._residuals.rescale(ratio)

    def _settle(self) -> None:
        """Take what was sent last off what is held back, as the next step would."""
        for name, sent in self._sent.items():
            shape = (sent.p.shape[1], sent.q.shape[1], self._rank)
            low_rank_settle(self._residuals.part(name).data_ptr(), sent.p.data_ptr(), sent.q.data_ptr(), shape)
            sent.q.zero_()

    def state_dict(self, group: EngineGroup) -> dict[str, Any]:
        """What was held back, and where the next step begins, which is the same on all workers."""
        self._settle()
        starts = {name: start.clone() for name, start in self._starts.items()}
        return {"residual": self._residuals.state_dict(group), "start": starts}

    def load_state_dict(self, state: dict[str, Any], group: EngineGroup) -> None:
        """Take an equal part of what was held back. Where a step of another rank ended is of no use."""
        self._residuals.load_state_dict(state.get("residual", {}), group)
        self._sent.clear()
        self._starts = {name: start.clone() for name, start in state.get("start", {}).items()}
        self._plans.clear()


def _drop_broken(
    matrices: Sequence[_Matrix], places: Sequence[slice], residual: Tensor, sums: Tensor, *others: Tensor
) -> list[Part]:
    """The parts whose sums are not finite. There sums become zero, and what was held back is dropped."""
    numbers = sums[: places[-1].stop]
    if math.isfinite(torch.dot(numbers, numbers)):  # one that is not makes this so; or all are large
        return []
    lost = []
    for m, place in zip(matrices, places, strict=True):
        if not bool(sums[place].isfinite().all()):
            lost.append(m.part)
            for numbers in (sums, *others):
                numbers[place].zero_()
            residual[m.part.begin : m.part.end].zero_()
    return lost
