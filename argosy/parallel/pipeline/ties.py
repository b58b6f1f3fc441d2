"""Gradients of what several workers hold: added up between them, so that their copies stay the same bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from argosy.parallel.pipeline.links import Links


class Ties:
    """Parameters that are held by several workers, by these workers. One without a gradient counts as zero.

    Which of them are frozen may change from step to step, alike on all workers.
    """

    def __init__(self, links: Links, shared: Mapping[tuple[int, ...], Sequence[nn.Parameter]]) -> None:
        self._links = links
        self._all = {workers: list(tensors) for workers, tensors in shared.items() if links.rank in workers}

    @property
    def _shared(self) -> dict[tuple[int, ...], list[nn.Parameter]]:
        trained = {workers: [each for each in tensors if each.requires_grad] for workers, tensors in self._all.items()}
        return {workers: tensors for workers, tensors in trained.items() if tensors}

    @contextmanager
    def adding_up(self) -> Iterator[None]:
        """What backward passes in this block add to gradients is summed over all holders. All holders enter it."""
        parameters = [parameter for group in self._shared.values() for parameter in group]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None  # what was there is on all holders already
        yield
        self._add_up()
        for parameter, gradient in zip(parameters, before, strict=True):
            if gradient is not None and parameter.grad is not None:
                parameter.grad += gradient

    def _add_up(self) -> None:
        for workers, parameters in sorted(self._shared.items()):
            for dtype in sorted({parameter.dtype for parameter in parameters}, key=str):
                local = [_gradient(parameter) for parameter in parameters if parameter.dtype == dtype]
                flat = torch.cat([gradient.flatten() for gradient in local])
                _sum_among(flat, workers, self._links)
                for gradient, summed in zip(local, flat.split([each.numel() for each in local]), strict=True):
                    gradient.copy_(summed.view_as(gradient))


def make_one(tensors: Sequence[Tensor], workers: tuple[int, ...], links: Links) -> None:
    """Replace tensors on these workers by their mean, or by the first worker's if they are not of floating point."""
    for tensor in tensors:
        flat = tensor.detach().flatten().clone()
        if not flat.is_floating_point() and links.rank != workers[0]:
            flat.zero_()
        _sum_among(flat, workers, links)
        if flat.is_floating_point():
            flat /= len(workers)
        tensor.detach().copy_(flat.view_as(tensor))


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = parameter.grad.detach()
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _sum_among(flat: Tensor, workers: tuple[int, ...], links: Links) -> None:
    """Each worker adds up one stretch of the numbers, in the workers' order, and tells the others."""
    me = workers.index(links.rank)
    stretches = flat.tensor_split(len(workers))
    mine, peers = stretches[me], [(at, worker) for at, worker in enumerate(workers) if at != me]
    waits = [links.send(stretches[at], worker) for at, worker in peers if stretches[at].numel()]
    copies = {at: torch.empty_like(mine) for at, _ in peers}
    waits += [links.receive(copies[at], worker) for at, worker in peers if mine.numel()]
    for wait in waits:
        wait()
    total = torch.zeros_like(mine)
    for at in range(len(workers)):
        total += mine if at == me else copies[at]
    mine.copy_(total)
    waits = [links.send(total, worker) for _, worker in peers if total.numel()]
    waits += [links.receive(stretches[at], worker) for at, worker in peers if stretches[at].numel()]
    for wait in waits:
        wait()
