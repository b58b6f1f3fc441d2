"""Forward only, through all stages: the model's output, known to every worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from argosy.parallel.pipeline.links import Links, Wait
from argosy.parallel.pipeline.micro_batches import MicroBatch, joined
from argosy.parallel.pipeline.stage_module import StageModule
from argosy.parallel.pipeline.trace import Meta

_PLAIN = (int, float, str, bytes, bool, type(None))


def evaluate(
    modules: Mapping[int, StageModule],
    batch: Sequence[MicroBatch],
    links: Links,
    stages: int,
    *,
    owner: Callable[[int, int], int],
    metas: Callable[[int, int], tuple[Meta, ...]],
    shapes: Sequence[Any],
) -> Any:
    """The output for a batch. Each worker runs its stages, one after the other, on those micro-batches that it owns.

    `owner(stage, number)` is the worker that runs a stage on a micro-batch, `metas(stage, number)` what the stage
    receives for it, and `shapes` the outputs of the micro-batches without their numbers.
    """
    kept: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    outputs: dict[int, Any] = {}
    waits: list[Wait] = []
    with torch.no_grad():
        for stage, module in sorted(modules.items()):
            for number in range(len(batch)):
                if owner(stage, number) != links.rank:
                    continue
                received = kept.pop((stage, number), ())
                if stage and owner(stage - 1, number) != links.rank:
                    received = _receive(links, owner(stage - 1, number), metas(stage, number), module.device)
                module.chunk = number
                output = module(*received)
                if module.is_last:
                    outputs[number] = output
                elif (following := owner(stage + 1, number)) == links.rank:
                    kept[stage + 1, number] = output
                else:
                    waits += [links.send(tensor, following) for tensor in output]
        for wait in waits:
            wait()
        told = [
            _told(outputs.get(number), shapes[number], links, owner(stages - 1, number)) for number in range(len(batch))
        ]
    return joined(told, [part.samples for part in batch])


def _receive(links: Links, source: int, metas: tuple[Meta, ...], device: torch.device) -> tuple[Tensor, ...]:
    tensors = tuple(torch.empty(meta.shape, dtype=meta.dtype, device=device) for meta in metas)
    for wait in [links.receive(tensor, source) for tensor in tensors]:
        wait()
    return tensors


def _told(output: Any, shapes: Any, links: Links, root: int) -> Any:
    """The output of one micro-batch, from the worker that has it."""
    leaves, spec = pytree.tree_flatten(output if links.rank == root else shapes)
    told: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            if not isinstance(leaf, _PLAIN):
                kind = type(leaf).__name__
                raise TypeError(
                    f"the model returns a {kind}; in a pipeline, outputs are tensors in tuples, lists and dicts"
                )
            told.append(leaf)
            continue
        here = (
            leaf.contiguous() if links.rank == root else torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        )
        links.broadcast(here, root)
        told.append(here)
    return pytree.tree_unflatten(told, spec)
