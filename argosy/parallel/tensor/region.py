"""How activations come into the divided part of a layer, and leave it: what all divided layers of a model share."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from argosy.parallel.tensor.crossing import PARTIAL, REPLICATE, SumBackward, SumForward, shard_dim, unwrap, wrap


class Region:
    """The ranks of one tensor axis, as a model's divided layers see them."""

    def __init__(self, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        self.mesh, self.group = mesh, mesh.get_group()
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self.latest = ""  # the name of the layer that divided an activation last: errors further on name it
        self._sequence, self._warned = sequence_parallel, False
        self._entered: tuple[Tensor, int, bool, Tensor] | None = None

    def enter(self, x: Tensor) -> Tensor:
        """What every rank has whole, for layers of which each has a part.

        Several layers often take the same tensor (q, k and v; the two halves of a gated MLP): its gradients are then
        added up before they are summed over ranks, once.
        """
        if isinstance(x, DTensor):
            whole = x if x.placements == (REPLICATE,) else x.redistribute(placements=(REPLICATE,))
            return unwrap(whole, PARTIAL)
        learning = torch.is_grad_enabled() and x.requires_grad
        if not learning:
            return x
        known = self._entered
        if known is not None and known[0] is x and known[1] == x._version:
            return known[3]
        entered: Tensor = SumBackward.apply(x, self.group)  # type: ignore[no-untyped-call]
        self._entered = (x, x._version, learning, entered)
        return entered

    def divided(self, x: Tensor) -> Tensor:
        """This rank's part of the last dimension."""
        if isinstance(x, DTensor):
            last = Shard(x.dim() - 1)
            return unwrap(x if x.placements == (last,) else x.redistribute(placements=(last,)))
        width = x.shape[-1] // self.size
        return self.enter(x).narrow(-1, self.rank * width, width)

    def fused(self, whole: Tensor, parts: int) -> Tensor:
        """This rank's part of each of a vector's equal parts."""
        return self.enter(whole).view(parts, self.size, -1)[:, self.rank].reshape(-1)

    def leave(self, partial: Tensor, name: str) -> Tensor:
        """The sum of what ranks have computed: whole, or divided along the sequence."""
        if self._sequence and partial.dim() > 2:
            if partial.shape[1] % self.size == 0:
                return wrap(partial, self.mesh, PARTIAL).redistribute(placements=(Shard(1),))
            self._warn(name, partial.shape[1])
        total: Tensor = SumForward.apply(partial.contiguous(), self.group)  # type: ignore[no-untyped-call]
        return total

    def forget(self) -> None:
        """A pass is over: keep none of its tensors."""
        self._entered = None

    def _warn(self, name: str, length: int) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{name}: a sequence of {length} does not divide by tensor={self.size}; sequence_parallel=true leaves "
                f"such sequences whole: pad them to {-(-length // self.size) * self.size}",
                stacklevel=3,
            )


def is_divided(tensor: Tensor) -> bool:
    """Whether ranks have different parts of it."""
    return isinstance(tensor, DTensor) and shard_dim(tensor.placements[0]) is not None
