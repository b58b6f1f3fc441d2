"""Pieces: a tensor as one rank holds it, whatever holds it: a plain tensor, or a DTensor on any mesh.

Saving writes pieces, and loading fills them where they are. Views throughout: nothing is copied or gathered here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from argosy.checkpoint.boxes import Box, Run, boxes_of, chunk, interleaved, whole
from argosy.checkpoint.errors import CheckpointError


@dataclass(frozen=True)
class Pieces:
    """A tensor's global shape and type, and the parts of it that are here: views, each with its box."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: list[tuple[Box, Tensor]] = field(repr=False)

    def view(self, wanted: Box) -> Tensor:
        """The elements of a box that lies within one of the parts."""
        for box, tensor in self.parts:
            if not box.sizes or box.overlap(wanted) == wanted:
                return tensor[wanted.within(box)] if box.sizes else tensor
        raise KeyError(str(wanted))


def pieces_of(tensor: Tensor, where: str) -> Pieces:
    """What of a tensor is here. `where` names it in errors."""
    if isinstance(tensor, DTensor):
        return _of_dtensor(cast(DTensor, tensor.detach()), where)
    plain = tensor.detach()
    if plain.layout != torch.strided or plain.is_quantized or plain.is_meta:
        kind = "on the meta device" if plain.is_meta else "sparse or quantised"
        raise CheckpointError(f"{where} is {kind}; a checkpoint holds dense tensors")
    return Pieces(tuple(plain.shape), plain.dtype, [(whole(plain.shape), plain)] if plain.numel() else [])


def _of_dtensor(tensor: DTensor, where: str) -> Pieces:
    shape, mesh, placements = tuple(tensor.shape), tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # this rank is not in the tensor's mesh
        return Pieces(shape, tensor.dtype, [])
    local = tensor.to_local()
    for outer_last in (True, False):
        runs = held(shape, tuple(mesh.shape), coordinate, placements, outer_last=outer_last, where=where)
        if tuple(sum(end - begin for begin, end in along) for along in runs) == tuple(local.shape) or (
            math.prod(local.shape) == 0 and any(not along for along in runs)
        ):
            parts = [(box, local[here.within(whole(local.shape))] if shape else local) for box, here in boxes_of(runs)]
            return Pieces(shape, tensor.dtype, parts)
    raise CheckpointError(
        f"{where}: this rank has a part of shape {list(local.shape)}, which is not what {placements} of "
        f"{list(shape)} on a mesh of {list(mesh.shape)} gives it"
    )


def held(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
    *,
    outer_last: bool = True,
    where: str = "a tensor",
) -> list[list[Run]]:
    """The runs of indices, along each dimension, that the rank at a coordinate of a mesh holds.

    Placements divide from left to right. A strided one to the left of plain ones stands for the reverse: FSDP2 cuts
    what tensor parallelism has cut already. `outer_last` takes it at its word; where a dimension does not divide evenly
    that is not quite what the placements, read from left to right, say.
    """
    runs: list[list[Run]] = [[(0, size)] for size in shape]
    late: list[tuple[int, _StridedShard]] = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            pieces = placement._split_factor_int()
            if outer_last and pieces == _ways(placements, mesh_shape, axis, placement.dim):
                late.append((axis, placement))
                continue
            dim = placement.dim % len(shape)
            runs[dim] = interleaved(runs[dim], pieces, mesh_shape[axis], coordinate[axis])
        elif isinstance(placement, Shard):
            dim = placement.dim % len(shape)
            runs[dim] = chunk(runs[dim], mesh_shape[axis], coordinate[axis])
        elif not isinstance(placement, Replicate):
            raise CheckpointError(
                f"{where} is placed as {placement}: finish its reduction (redistribute) before saving it"
            )
    for axis, placement in reversed(late):
        dim = placement.dim % len(shape)
        runs[dim] = chunk(runs[dim], mesh_shape[axis], coordinate[axis])
    return runs


def _ways(placements: Sequence[Placement], mesh_shape: Sequence[int], axis: int, dim: int) -> int:
    """Into how many parts the axes to the right of one cut a dimension."""
    ways = 1
    for other in range(axis + 1, len(placements)):
        placement = placements[other]
        if isinstance(placement, (Shard, _StridedShard)) and placement.dim == dim:
            ways *= mesh_shape[other]
    return ways
