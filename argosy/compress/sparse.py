"""What the sparse codecs share: the largest numbers of a gradient are sent, and the rest is kept for later steps.

For each large tensor of a bucket, the native core adds this worker's share to what it has kept, takes the k largest
numbers out, and writes them as entries (value, and distance from the one before: csrc/codec_sparse.h). The entries of
all tensors make one message; all workers gather all messages and add them up in the order of ranks, so they get the
same bits. Small tensors are summed as they are, in one all-reduce for the bucket, which runs meanwhile.

[Note: dense when cheaper]
A gathered message goes to everybody, so its cost rises with the number of workers, and an all-reduce's does not; in
shared memory an all-reduce costs next to nothing, less than finding out what is large if that is much. So for each
bucket the group's cost model is asked, and if all of it had better be summed, all that was kept is sent. The answer
depends on sizes and on the measured links, which are the same for all workers: they decide alike.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from argosy._native import sparse_add, sparse_compress, sparse_drain, sparse_entries
from argosy.comm.engine import EngineGroup
from argosy.comm.pending import DONE, Pending
from argosy.comm.schedule import Collective
from argosy.comm.select import Selector
from argosy.compress.codec import Bucket, Codec, Part
from argosy.compress.kept import Rooms, Scratch

Exchange = Literal["auto", "sparse", "dense"]
_VALUE_BYTES, _GAP_BYTES = 4, 2
# What it takes to choose and pack an entry, beyond what summing its tensor takes, and to add one. Measured on a Zen 4;
# the same for all workers, whatever their CPUs, as they must decide alike.
_CHOOSING_SECONDS, _ADDING_SECONDS = 20e-9, 4e-9


@dataclass(frozen=True)
class Rule:
    """How a share is added to what is kept: g = scale * share + decay * parameter, then momentum."""

    scale: float = 1.0
    decay: float = 0.0
    parameter: Tensor | None = None
    momentum: float = 0.0
    nesterov: bool = False


@dataclass
class Kept:
    """What a worker keeps of one tensor: `rest` was not sent yet, `velocity` is its momentum, if there is one."""

    rest: Tensor | None = None
    velocity: Tensor | None = None


class SparseCodec(Codec):
    """Sends the largest numbers of large tensors. What is large, and what momentum there is, subclasses say."""

    weighs = True
    exchange: Exchange = "auto"  # anything else is for tests and measurements

    def __init__(self, exchange: Exchange | None = None) -> None:
        super().__init__()
        self._in_use: Rule | None = None
        self.exchange = exchange or self.exchange
        self._kept: dict[str, Kept] = {}
        self._scratch = Scratch()

    @abstractmethod
    def suits(self, part: Part) -> bool:
        """Whether a tensor is sent sparse: a function of its shape alone, the same on all workers."""

    @abstractmethod
    def fraction(self) -> float:
        """How much of a tensor is sent in this step."""

    def rule(self, part: Part, share: Tensor, weight: float, group: EngineGroup) -> Rule:
        """How a large tensor's share, which still has to be weighted, is added to what is kept."""
        return Rule(scale=weight)

    def land(self, part: Part, total: Tensor, gaps: Tensor) -> None:
        """A large tensor's sum is there; all workers' gaps, by worker, lead to all that is not zero."""

    def prepare(self, part: Part, share: Tensor, group: EngineGroup) -> None:
        """Change a small tensor's share before it is summed."""

    def finish(self, part: Part, total: Tensor) -> None:
        """Change a small tensor's sum."""

    def steps(self, bucket: Bucket, group: EngineGroup) -> Iterator[Pending]:
        """Sum a bucket over all workers: what is largest, or everything where that is cheaper."""
        large = [part for part in bucket.parts if self.suits(part)]
        small = [part for part in bucket.parts if not self.suits(part)]
        for part in small:
            if bucket.weight != 1.0:
                _view(bucket, part).mul_(bucket.weight)
            self.prepare(part, _view(bucket, part), group)
        message = _Message(large, self.fraction())
        if self._is_sparse(message, small, bucket, group):
            with self._scratch.lend(group) as rooms:
                summing = self._sum_small(small, bucket, rooms, group)
                yield from self._sum_large(message, bucket, rooms, group)
                summing.wait()
                self._take_small(small, bucket, rooms)
                everybodys = rooms.take("messages", message.size_bytes * group.size, torch.uint8)
                for number, part in enumerate(large):
                    self.land(part, _view(bucket, part), message.gaps(everybodys, group.size, number))
        else:
            for part in large:
                self._drain(part, bucket, group)
            self.bytes_sent += bucket.flat.numel() * _VALUE_BYTES
            yield group.all_reduce(bucket.flat, wait=False)
        for part in small:
            self.finish(part, _view(bucket, part))

    def meet(self, name: str, parameter: nn.Parameter) -> None:
        """Of a parameter that is new nothing was kept."""
        self._kept.pop(name, None)

    def rescale(self, ratio: float) -> None:
        """What is kept is as large as it would have been."""
        for kept in self._kept.values():
            for numbers in (kept.rest, kept.velocity):
                if numbers is not None:
                    numbers.mul_(ratio)

    def state_dict(self, group: EngineGroup) -> dict[str, Any]:
        """What all workers have kept, added up."""
        return {
            "rest": {name: _total(self._kept[name].rest, group) for name in self._names("rest")},
            "velocity": {name: _total(self._kept[name].velocity, group) for name in self._names("velocity")},
        }

    def load_state_dict(self, state: dict[str, Any], group: EngineGroup) -> None:
        """Take this worker's part: all get the same."""
        self._kept = {}
        for kind in ("rest", "velocity"):
            for name, total in state.get(kind, {}).items():
                kept = self._kept.setdefault(name, Kept())
                setattr(kept, kind, (total.to(torch.float32) / group.size).reshape(-1).contiguous())

    def _names(self, kind: str) -> list[str]:
        return sorted(name for name, kept in self._kept.items() if getattr(kept, kind) is not None)

    def _is_sparse(self, message: _Message, small: Sequence[Part], bucket: Bucket, group: EngineGroup) -> bool:
        """See [Note: dense when cheaper]."""
        if not message.parts or self.fraction() >= 1 or group.size == 1:
            return False
        if self.exchange != "auto":
            return self.exchange == "sparse"
        small_bytes = _numbers_in(small) * _VALUE_BYTES
        gathering = _seconds(group.selector, Collective.ALL_GATHER, message.size_bytes * group.size)
        summing = _seconds(group.selector, Collective.ALL_REDUCE, small_bytes) if small else 0.0
        computing = sum(message.entries) * (_CHOOSING_SECONDS + group.size * _ADDING_SECONDS)
        whole = _seconds(group.selector, Collective.ALL_REDUCE, bucket.flat.numel() * _VALUE_BYTES)
        return gathering + summing + computing < whole

    def _sum_large(self, message: _Message, bucket: Bucket, rooms: Rooms, group: EngineGroup) -> Iterator[Pending]:
        mine = rooms.take("message", message.size_bytes, torch.uint8)
        for number, (part, k) in enumerate(zip(message.parts, message.counts, strict=True)):
            values, gaps = message.addresses(mine, number)
            numbers = self._numbers(part, bucket, group)
            sparse_compress(*numbers, k, values, gaps)
        everybodys = rooms.take("messages", message.size_bytes * group.size, torch.uint8)
        self.bytes_sent += message.size_bytes
        yield group.all_gather_into(everybodys, mine, wait=False)
        for theirs in everybodys.chunk(group.size):
            for number, part in enumerate(message.parts):
                out = _view(bucket, part)
                values, gaps = message.addresses(theirs, number)
                sparse_add(out.data_ptr(), out.numel(), values, gaps, message.entries[number])

    def _drain(self, part: Part, bucket: Bucket, group: EngineGroup) -> None:
        """Add all that was kept to the share. Momentum stays: nothing was delayed, so none of it is stale."""
        sparse_drain(*self._numbers(part, bucket, group))

    def _numbers(
        self, part: Part, bucket: Bucket, group: EngineGroup
    ) -> tuple[int, int, int, int, int, float, float, float, bool]:
        """A share, what is kept of its tensor, and its rule, as the native core takes them."""
        share = _view(bucket, part)
        rule, kept = self.rule(part, share, bucket.weight, group), self._kept.setdefault(part.name, Kept())
        kept.rest = of_size(kept.rest, part)
        kept.velocity = of_size(kept.velocity, part) if rule.momentum else None
        self._in_use = rule  # it may hold the only reference to the numbers whose address goes to the native core
        return numbers_of(share, kept, rule)

    def _sum_small(self, small: Sequence[Part], bucket: Bucket, rooms: Rooms, group: EngineGroup) -> Pending:
        if not small:
            return DONE
        room = rooms.take("small", _numbers_in(small), torch.float32)
        torch.cat([_view(bucket, part) for part in small], out=room)
        self.bytes_sent += room.numel() * _VALUE_BYTES
        return group.all_reduce(room, wait=False)

    def _take_small(self, small: Sequence[Part], bucket: Bucket, rooms: Rooms) -> None:
        sums, begin = rooms.take("small", _numbers_in(small), torch.float32), 0
        for part in small:
            share = _view(bucket, part)
            share.copy_(sums[begin : begin + share.numel()])
            begin += share.numel()


class _Message:
    """The layout of a worker's entries for some tensors: all values, then all gaps."""

    def __init__(self, parts: Sequence[Part], fraction: float) -> None:
        self.parts = parts
        sizes = [part.end - part.begin for part in parts]
        self.counts = [min(max(round(fraction * size), 1), size) for size in sizes]
        self.entries = [sparse_entries(size, k) for size, k in zip(sizes, self.counts, strict=True)]
        *self._before, self._total = itertools.accumulate(self.entries, initial=0)
        # The next worker's begins behind it, and its values need to lie at a multiple of their size.
        self.size_bytes = math.ceil(self._total * (_VALUE_BYTES + _GAP_BYTES) / _VALUE_BYTES) * _VALUE_BYTES

    def addresses(self, message: Tensor, number: int) -> tuple[int, int]:
        """Where the values and the gaps of a tensor are in a message."""
        begin, before = message.data_ptr(), self._before[number]
        return begin + before * _VALUE_BYTES, begin + self._total * _VALUE_BYTES + before * _GAP_BYTES

    def gaps(self, messages: Tensor, size: int, number: int) -> Tensor:
        """The gaps of a tensor in the messages of so many workers, by worker."""
        begin = self._total * _VALUE_BYTES + self._before[number] * _GAP_BYTES
        end = begin + self.entries[number] * _GAP_BYTES
        return messages.view(size, self.size_bytes)[:, begin:end].view(torch.int16)


def numbers_of(share: Tensor, kept: Kept, rule: Rule) -> tuple[int, int, int, int, int, float, float, float, bool]:
    """The first arguments of the native functions."""
    parameter = rule.parameter if rule.decay else None
    return (
        share.data_ptr(),
        _address(kept.velocity),
        _address(kept.rest),
        _address(parameter),
        share.numel(),
        rule.scale,
        rule.decay,
        rule.momentum,
        rule.nesterov,
    )


def of_size(tensor: Tensor | None, part: Part) -> Tensor:
    """What was kept of a tensor, zeros at first; raises if it is of another size."""
    size = part.end - part.begin
    if tensor is None:
        return torch.zeros(size)
    if tensor.numel() != size:
        raise ValueError(
            f"what the codec has kept of {part.name} has {tensor.numel()} numbers, and its gradient {size}: "
            f"the checkpoint is of another model"
        )
    return tensor


def _address(tensor: Tensor | None) -> int:
    return tensor.data_ptr() if tensor is not None else 0


def _numbers_in(parts: Sequence[Part]) -> int:
    return sum(part.end - part.begin for part in parts)


def _view(bucket: Bucket, part: Part) -> Tensor:
    return bucket.flat[part.begin : part.end]


def _total(tensor: Tensor | None, group: EngineGroup) -> Tensor:
    assert tensor is not None
    total = tensor.clone()
    group.all_reduce(total)
    return total


def _seconds(selector: Selector, collective: Collective, size_bytes: int) -> float:
    """What the cost model predicts. It knows powers of two; in between, times lie on a straight line."""
    power = math.floor(math.log2(max(size_bytes, 8)))
    below, above = (selector.choose(collective, 1 << p).seconds for p in (power, power + 1))
    return below + (above - below) * max(size_bytes / (1 << power) - 1, 0.0)
