"""What the pieces of a model cost: the time of forward and backward between any two places where it can be cut."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from argosy.parallel.pipeline.gate import Arguments, Gate, Run, writable
from argosy.parallel.pipeline.trace import Trace

_ROUNDS = (3, 12)  # at least and at most; the first one warms up, and the fastest of each piece counts
_SECONDS = 1.0  # after which no other round is begun


def measured(
    model: nn.Module, gate: Gate, seen: Trace, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[float]:
    """The seconds of each piece on one micro-batch. The model, its buffers and random numbers are left as they were."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    rounds: list[list[float]] = []
    with torch.random.fork_rng():
        begun = time.perf_counter()
        while len(rounds) < _ROUNDS[0] or (len(rounds) < _ROUNDS[1] and time.perf_counter() - begun < _SECONDS):
            run = _Timing({call.name: call.travels for call in seen.cuts})
            with gate.open(run), torch.enable_grad():
                output = model(*args, **dict(kwargs))
            rounds.append(run.finish(output))
    for parameter, gradient in gradients:
        parameter.grad = gradient
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return [min(times) for times in zip(*rounds, strict=True)]


def counted(sizes: Mapping[str, int], seen: Trace) -> list[float]:
    """The elements of the parameters that each piece uses, if there are no numbers to run on."""
    begins = [call.time for call in seen.cuts]
    costs = [1.0] * (len(begins) + 1)
    for name, times in seen.uses.items():
        for piece in {sum(begin <= at for begin in begins) for at in times}:
            costs[piece] += sizes.get(name, 0)
    return costs


class _Timing(Run):
    """A forward pass in which every piece is a graph of its own, so that its backward can be timed alone."""

    def __init__(self, travels: Mapping[str, tuple[int, ...]]) -> None:
        self._travels = travels
        self._pieces: list[list[Tensor]] = []  # what each piece hands on
        self._seconds: list[float] = []
        self._fresh: dict[int, tuple[Tensor, Tensor]] = {}
        self._begun = time.perf_counter()

    def layer(self, name: str, module: nn.Module, arguments: Arguments, call: Callable[..., Any]) -> Any:
        if name in self._travels:
            leaves = pytree.tree_leaves(arguments)
            sent = [leaves[at] for at in self._travels[name]]
            self._end([self._current(tensor) for tensor in sent])
            for tensor in sent:
                self._fresh[id(tensor)] = tensor, writable(tensor.detach().requires_grad_(tensor.requires_grad))
            self._begun = time.perf_counter()
        args, kwargs = pytree.tree_map(lambda leaf: self._current(leaf), arguments)
        return call(*args, **kwargs)

    def finish(self, output: Any) -> list[float]:
        """Run backward, piece by piece; returns the seconds of each."""
        self._end([leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)])
        for number, handed_on in enumerate(self._pieces):
            roots = [tensor for tensor in handed_on if tensor.requires_grad]
            begun = time.perf_counter()
            if roots:
                torch.autograd.backward(roots, [torch.ones_like(tensor) for tensor in roots])
            self._seconds[number] += time.perf_counter() - begun
        return self._seconds

    def _current(self, leaf: Any) -> Any:
        """What stands for a tensor since the last cut that it has crossed."""
        return self._fresh[id(leaf)][1] if id(leaf) in self._fresh else leaf

    def _end(self, handed_on: list[Tensor]) -> None:
        self._seconds.append(time.perf_counter() - self._begun)
        self._pieces.append(handed_on)
