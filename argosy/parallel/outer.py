"""How replicas that have trained alone become one again: the outer step of a round.

Two of them. `Mean` replaces parameters by their weighted mean: local SGD. `Nesterov` takes the weighted mean of how far
the replicas have come as a gradient, and steps from where they started: DiLoCo (A. Douillard and others, DiLoCo:
Distributed Low-Communication Training of Language Models, 2023). With a rate of 1 and no momentum it is `Mean`.

[Note: working types]
Sums are made in float32, or float64 where parameters are that: a mean in 16 bits would lose what k steps have learned.
"""

from __future__ import annotations

import itertools
import warnings
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from argosy.comm.engine import EngineGroup
from argosy.comm.group import Group
from argosy.compress.codec import Bucket, Codec, Part


class Averaging:
    """The weighted mean of many tensors over all workers, in one buffer for each working type."""

    def __init__(self, group: Group) -> None:
        self.bytes_sent = 0
        self._group = group
        self._room: dict[torch.dtype, Tensor] = {}

    def average(self, tensors: Iterable[Tensor], weight: float) -> None:
        """Replace the tensors by their means; the weights of all workers add up to 1."""
        if self._group.size == 1:
            return
        by_type = defaultdict(list)
        for tensor in tensors:
            # Through `data`: a graph that is kept for another backward pass may hold the tensor, at the version it has.
            by_type[_working_type(tensor)].append(_real(tensor.data))
        for dtype, members in by_type.items():
            flat = self._take(sum(member.numel() for member in members), dtype)
            parts = _views(flat, members)
            _fill(flat, parts, members, weight)
            self._group.all_reduce(flat)
            self.bytes_sent += flat.numel() * flat.itemsize
            torch._foreach_copy_(members, parts)

    def _take(self, count: int, dtype: torch.dtype) -> Tensor:
        kept = self._room.get(dtype)
        if kept is None or kept.numel() < count:
            kept = self._room[dtype] = self._group.empty(count, dtype=dtype)
        return kept[:count]


class Outer(ABC):
    """An outer step. All workers call its methods alike, and have the same parameters after `meet`."""

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """What this worker has handed to operations, so far."""

    def begin(self) -> None:  # noqa: B027 - a mean remembers nothing
        """The parameters are the same on all workers now, and were set by somebody else."""

    def forget(self, group: Group) -> None:  # noqa: B027
        """Remember nothing of earlier rounds; all workers call this."""

    @abstractmethod
    def meet(self, weight: float, moved: Sequence[bool]) -> None:
        """Make the replicas one; `moved` says of each parameter whether it may differ."""

    def state_dict(self, group: Group) -> dict[str, Any]:
        """What a checkpoint keeps; all workers call this and get the same."""
        return {}

    def load_state_dict(self, state: dict[str, Any], group: Group) -> None:  # noqa: B027
        """Go on from a checkpoint, after the model was loaded from it."""


class Mean(Outer):
    """The weighted mean of the parameters."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], averaging: Averaging) -> None:
        self._parameters, self._averaging = list(parameters.values()), averaging

    @property
    def bytes_sent(self) -> int:
        """Counted by the averaging."""
        return 0

    def meet(self, weight: float, moved: Sequence[bool]) -> None:
        """Average what has moved: a mean of equal numbers is not always that number."""
        self._averaging.average([p for p, differs in zip(self._parameters, moved, strict=True) if differs], weight)


class Nesterov(Outer):
    """Nesterov's method on the mean difference. Every worker takes the same step, from the same numbers.

    With g the mean of (start - parameter): u = momentum u + g, and start = start - lr (g + momentum u), which is what
    `torch.optim.SGD(nesterov=True)` computes. A codec may send the differences; it keeps what it leaves out.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], group: Group, lr: float, momentum: float, codec: Codec | None
    ) -> None:
        self._group, self._lr, self._momentum, self._codec = group, lr, momentum, codec
        by_type: dict[torch.dtype, dict[str, nn.Parameter]] = defaultdict(dict)
        for name, parameter in parameters.items():
            by_type[_working_type(parameter)][name] = parameter
        if codec is not None and set(by_type) - {torch.float32}:
            raise ValueError("sync=diloco:k:int4 is for parameters of at most 32 bits; use diloco:k with float64")
        self._names = list(parameters)
        self._blocks = [_Block(members, group, dtype) for dtype, members in by_type.items()]
        self._sent_plain = 0

    @property
    def bytes_sent(self) -> int:
        """The differences, as they were sent."""
        return self._sent_plain + (self._codec.bytes_sent if self._codec is not None else 0)

    def begin(self) -> None:
        """Start from the parameters as they are. The momentum stays, as an optimizer's does when a model is loaded."""
        for block in self._blocks:
            block.start_here()

    def forget(self, group: Group) -> None:
        """Without momentum, and without what the codec owes."""
        for block in self._blocks:
            block.momentum.zero_()
        if self._codec is not None and group.size > 1:
            self._codec.load_state_dict({}, cast(EngineGroup, group))

    def meet(self, weight: float, moved: Sequence[bool]) -> None:
        """One outer step. A parameter that no worker has moved stays, whatever its momentum: it may be frozen.

        What a codec still owed of it is lost then.
        """
        stay = {name for name, differs in zip(self._names, moved, strict=True) if not differs}
        for block in self._blocks:
            block.measure(weight)
            if self._codec is not None and self._group.size > 1:
                self._codec.reduce(Bucket(block.share, block.parts), cast(EngineGroup, self._group))
            else:
                self._group.all_reduce(block.share)
                self._sent_plain += block.share.numel() * block.share.itemsize
            block.step(self._lr, self._momentum, stay)

    def state_dict(self, group: Group) -> dict[str, Any]:
        """The momentum, where the next round starts if parameters are too coarse to say, and what the codec keeps."""
        momentum, start = {}, {}
        for block in self._blocks:
            momentum.update(block.named(block.momentum))
            start.update(block.finer())
        kept = self._codec.state_dict(cast(EngineGroup, group)) if self._codec is not None and group.size > 1 else {}
        return {"momentum": momentum, "start": start, "codec": kept}

    def load_state_dict(self, state: dict[str, Any], group: Group) -> None:
        """Take the momentum and the start; what the codec has kept is divided among the workers."""
        for block in self._blocks:
            block.start_here()
            block.load(block.momentum, state["momentum"], required=True)
            block.load(block.start, state["start"], required=False)
        if self._codec is not None and group.size > 1:
            self._codec.load_state_dict(state["codec"], cast(EngineGroup, group))
        elif state["codec"]:
            warnings.warn(
                "the checkpoint has what quantised rounds still owed (sync=diloco:k:int4), and a job of one worker, or "
                "without int4, quantises nothing: it is left out",
                stacklevel=2,
            )


class _Block:
    """All parameters of one working type, one behind the other."""

    def __init__(self, members: dict[str, nn.Parameter], group: Group, dtype: torch.dtype) -> None:
        self._names, self._parameters = list(members), list(members.values())
        tensors = self._tensors()
        count = sum(tensor.numel() for tensor in tensors)
        self.start, self.momentum = torch.empty(count, dtype=dtype), torch.zeros(count, dtype=dtype)
        self.share = group.empty(count, dtype=dtype)
        self._starts, self._shares, self._momenta = (
            _views(flat, tensors) for flat in (self.start, self.share, self.momentum)
        )
        ends = list(itertools.accumulate((tensor.numel() for tensor in tensors), initial=0))
        self.parts = tuple(
            Part(name, tuple(tensor.shape), begin, end)
            for name, tensor, begin, end in zip(self._names, tensors, ends, ends[1:], strict=False)
        )

    def _tensors(self) -> list[Tensor]:
        """Looked up each time: moving a model to another device or type gives its parameters other memory."""
        return [_real(parameter.data) for parameter in self._parameters]

    def start_here(self) -> None:
        torch._foreach_copy_(self._starts, self._tensors())

    def measure(self, weight: float) -> None:
        """This worker's share of the mean difference."""
        if not weight:
            self.share.zero_()
            return
        for share, start, tensor in zip(self._shares, self._starts, self._tensors(), strict=True):
            # Parameters of 16 bits began at the start as it was rounded for them.
            share.copy_(start.to(tensor.dtype)).sub_(tensor.to(share.device, share.dtype))
        self.share.mul_(weight)

    def step(self, lr: float, momentum: float, stay: Collection[str]) -> None:
        """All parameters but those that `stay`."""
        going = [number for number, name in enumerate(self._names) if name not in stay]
        tensors, starts, shares, momenta = (
            [each[number] for number in going] for each in (self._tensors(), self._starts, self._shares, self._momenta)
        )
        if going:
            torch._foreach_mul_(momenta, momentum)
            torch._foreach_add_(momenta, shares)
            torch._foreach_add_(shares, momenta, alpha=momentum)
            torch._foreach_sub_(starts, shares, alpha=lr)
            torch._foreach_copy_(tensors, starts)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        return dict(zip(self._names, _views(flat, self._tensors()), strict=True))

    def finer(self) -> dict[str, Tensor]:
        """The starts of those parameters that hold fewer bits."""
        coarse = {n for n, tensor in zip(self._names, self._tensors(), strict=True) if tensor.dtype != self.start.dtype}
        return {name: start for name, start in self.named(self.start).items() if name in coarse}

    def load(self, flat: Tensor, state: Mapping[str, Tensor], required: bool) -> None:
        for name, part in self.named(flat).items():
            if name in state and state[name].shape == part.shape:
                part.copy_(state[name])
            elif name in state or required:
                held = f"has the shape {tuple(state[name].shape)}" if name in state else "is absent"
                raise ValueError(
                    f"the outer state of {name} {held} in the checkpoint, and the model's is {tuple(part.shape)}: "
                    f"it was saved with another model"
                )


def _working_type(tensor: Tensor) -> torch.dtype:
    """See [Note: working types]."""
    return torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else torch.float32


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _views(flat: Tensor, members: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([member.numel() for member in members])
    return [part.view(member.shape) for part, member in zip(parts, members, strict=True)]


def _fill(flat: Tensor, parts: list[Tensor], members: list[Tensor], weight: float) -> None:
    if not weight:
        flat.zero_()  # not a product: what a worker without a sample holds may be NaN
        return
    torch._foreach_copy_(parts, members)
    if weight != 1:
        flat.mul_(weight)
