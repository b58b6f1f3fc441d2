"""What divided layers compute: linear layers by columns or rows, embeddings by vocabulary, and whole ones beside them.

Each function takes the place of a module's `forward`. Parameters are DTensors; a layer computes with its rank's part
of them, as a plain tensor, because what DTensor would do for each operation is known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from argosy.parallel.tensor.crossing import plain, unwrap, wrap
from argosy.parallel.tensor.region import Region

Forward = Callable[..., Any]


def local(parameter: Tensor | None) -> Tensor:
    """A rank's part of a parameter, which computes; its gradient goes to the parameter."""
    return unwrap(cast(DTensor, parameter))


def column(module: nn.Linear, parts: int, region: Region, name: str) -> Forward:
    """A linear layer of which each rank has some outputs: of each of `parts` equal parts, as of a fused q, k and v."""

    def forward(input: Tensor) -> Tensor:
        entered = region.enter(input)
        bias = None if module.bias is None else local(module.bias)
        if bias is not None and parts > 1:
            bias = region.fused(bias, parts)
        output = F.linear(entered, local(module.weight), bias)
        last = output.dim() - 1
        region.latest = name
        placement: Placement = Shard(last) if parts == 1 else _StridedShard(last, split_factor=parts)
        return wrap(output, region.mesh, placement)

    return forward


def row(module: nn.Linear, region: Region, name: str) -> Forward:
    """A linear layer of which each rank takes some inputs; their products are summed."""

    def forward(input: Tensor) -> Tensor:
        output = region.leave(F.linear(region.divided(input), local(module.weight)), name)
        return output if module.bias is None else output + local(module.bias)

    return forward


def vocabulary(module: nn.Embedding, region: Region, name: str) -> Forward:
    """An embedding of which each rank has some rows; it gives zeros for the others, and the sum has all."""
    rows = module.num_embeddings // region.size
    first = region.rank * rows
    padding = None if module.padding_idx is None else module.padding_idx - first

    def forward(input: Tensor) -> Tensor:
        ids = plain(input)
        if bool(((ids < 0) | (ids >= module.num_embeddings)).any()):
            raise IndexError(f"{name}: an index is outside its {module.num_embeddings} rows")
        elsewhere = (ids < first) | (ids >= first + rows)
        mine = (ids - first).masked_fill(elsewhere, 0)
        kept = padding if padding is not None and 0 <= padding < rows else None
        found = F.embedding(mine, local(module.weight), kept)
        return region.leave(found.masked_fill(elsewhere[..., None], 0), name)

    return forward


def whole(owners: Sequence[nn.Module], forward: Forward) -> Forward:
    """A module that every rank has whole: while it computes, it and the `owners` of its parameters see plain ones."""

    def replaced(*arguments: Any, **keywords: Any) -> Any:
        kept = [owner._parameters for owner in owners]
        for owner, parameters in zip(owners, kept, strict=True):
            seen = {name: _seen(parameter) for name, parameter in parameters.items()}
            object.__setattr__(owner, "_parameters", seen)
        try:
            return forward(*arguments, **keywords)
        finally:
            for owner, parameters in zip(owners, kept, strict=True):
                object.__setattr__(owner, "_parameters", parameters)

    return replaced


def _seen(parameter: Tensor | None) -> Tensor | None:
    # A parameter of a module that is whole may be one with that of a divided one (tied weights): it stays a DTensor.
    whole = isinstance(parameter, DTensor) and parameter.placements[0].is_replicate()
    return local(parameter) if whole else parameter
