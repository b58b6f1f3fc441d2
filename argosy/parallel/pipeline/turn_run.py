"""One step of one worker in a pipeline whose stages take turns: its program, with messages around each action."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from argosy.parallel.pipeline.bubble import Action, Meter
from argosy.parallel.pipeline.links import Links, Wait
from argosy.parallel.pipeline.stage_module import StageModule
from argosy.parallel.pipeline.trace import Meta

_AHEAD = 2  # actions whose messages are awaited before it is their turn


class TurnRun:
    """A step. `received` and `sent` have the shapes that cross the stage's ends, for each micro-batch."""

    def __init__(
        self,
        module: StageModule,
        links: Links,
        owner: Callable[[int, int], int],
        received: Sequence[tuple[Meta, ...]],
        sent: Sequence[tuple[Meta, ...]],
        meter: Meter,
    ) -> None:
        self._module, self._links, self._owner, self._meter = module, links, owner, meter
        self._received, self._sent = received, sent
        self._posted: dict[Action, tuple[list[Tensor], list[Wait]]] = {}
        self._under_way: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # what came in and what came out
        self._sends: list[Wait] = []

    def run(self, program: Sequence[Action]) -> None:
        """Forward and backward of this worker's micro-batches."""
        for at, action in enumerate(program):
            for coming in program[at : at + 1 + _AHEAD]:
                self._post(coming)
            tensors, waits = self._posted.pop(action)
            for wait in waits:
                wait()
            if action.kind == "F":
                self._forward(action, tensors)
            else:
                self._backward(action, tensors)
        for wait in self._sends:
            wait()

    def _post(self, action: Action) -> None:
        """Start to receive what an action needs."""
        if action in self._posted:
            return
        kind, stage, number = action
        if kind == "F":
            metas, source = self._received[number], stage - 1
        else:
            metas, source = tuple(meta for meta in self._sent[number] if meta.requires_grad), stage + 1
        tensors = [torch.empty(meta.shape, dtype=meta.dtype, device=self._module.device) for meta in metas]
        waits = [self._links.receive(tensor, self._owner(source, number), _tag(kind, number)) for tensor in tensors]
        self._posted[action] = tensors, waits

    def _forward(self, action: Action, received: list[Tensor]) -> None:
        number = action.micro_batch
        inputs = [
            tensor.requires_grad_(meta.requires_grad)
            for tensor, meta in zip(received, self._received[number], strict=True)
        ]
        with self._meter.working():
            self._module.chunk = number
            output = self._module(*inputs)
        outputs = [output] if self._module.is_last else list(output)
        self._under_way[number] = inputs, outputs
        if not self._module.is_last:
            self._send([tensor.detach() for tensor in outputs], action, action.stage + 1)

    def _backward(self, action: Action, gradients: list[Tensor]) -> None:
        inputs, outputs = self._under_way.pop(action.micro_batch)
        with self._meter.working():
            roots = [tensor for tensor in outputs if tensor.requires_grad]
            torch.autograd.backward(roots, None if self._module.is_last else gradients)
        leaves = [tensor for tensor in inputs if tensor.requires_grad]
        back = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous() for leaf in leaves]
        self._send(back, action, action.stage - 1)

    def _send(self, tensors: list[Tensor], action: Action, stage: int) -> None:
        number = action.micro_batch
        self._sends += [
            self._links.send(tensor, self._owner(stage, number), _tag(action.kind, number)) for tensor in tensors
        ]


def _tag(kind: str, micro_batch: int) -> int:
    return 2 * micro_batch + (kind == "B")
