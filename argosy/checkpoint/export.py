"""A model as one plain safetensors file, for programs that know nothing of Argosy.

Tensors that are divided over ranks are put together one at a time, on rank 0, which writes each as it comes. Tensors
that share memory, such as tied weights, are written once, under the first of their names, as safetensors itself does.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from argosy.checkpoint import shard
from argosy.checkpoint.agree import on_first, together
from argosy.checkpoint.boxes import Box
from argosy.checkpoint.errors import CheckpointError
from argosy.checkpoint.pieces import Pieces, pieces_of
from argosy.checkpoint.plan import Planned, describe, plan
from argosy.checkpoint.storage import make_folder, sync_folder
from argosy.comm.engine import EngineGroup
from argosy.comm.group import Group


def export(path: str | Path, model: nn.Module, group: Group) -> None:
    """Write a model's tensors, whole, into one file on rank 0. All workers call it."""
    held: dict[str, Pieces] = {}

    def take() -> Any:
        if re.match(r"[a-z][a-z0-9+]+:/", str(path)):
            raise CheckpointError(f"{path} is a URL; a model is exported to a path of the first worker's")
        seen: dict[Any, str] = {}
        # A rank without a part of tied weights sees by the parameter alone that they are one.
        named = model.named_parameters(remove_duplicate=False)
        again = {name for name, parameter in named if seen.setdefault(id(parameter), name) != name}
        for name, value in model.state_dict().items():
            if name in again:
                continue
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"{name} of the model is a {type(value).__name__}; a safetensors file holds tensors"
                )
            pieces = pieces_of(value, name)
            same = tuple((box, part.data_ptr(), part.stride()) for box, part in pieces.parts)
            if not same or seen.setdefault((pieces.dtype, same), name) == name:
                held[name] = pieces
        return describe(held)

    planned = plan(together(group, take), lambda _: True)
    failure: list[Exception] = []
    tensors = _assembled(planned, held, group)
    if group.rank == 0:
        try:
            _write(Path(path), planned, tensors)
        except (OSError, CheckpointError) as error:
            failure.append(error)
    for _ in tensors:  # the others, and what is left after a failure
        pass

    def check() -> None:
        if failure:
            raise CheckpointError(f"{path} could not be written: {failure[0]}") from failure[0]

    on_first(group, check)


def _assembled(planned: dict[str, Planned], held: dict[str, Pieces], group: Group) -> Iterator[Tensor]:
    """Each tensor, whole on rank 0 and empty elsewhere, in the order of the file."""
    for name in _order(planned):
        tensor = planned[name]
        dtype = shard.DTYPES[tensor.dtype]
        out = torch.empty(tensor.shape if group.rank == 0 else (0,), dtype=dtype)
        for box, rank in tensor.boxes:
            if rank == group.rank:
                mine = held[name].view(box).cpu().resolve_conj().resolve_neg()
                if rank == 0:
                    _part(out, box).copy_(mine)
                else:
                    cast(EngineGroup, group).send(_bytes(mine.contiguous()), 0)
            elif group.rank == 0:
                theirs = torch.empty(box.sizes, dtype=dtype)
                cast(EngineGroup, group).receive(_bytes(theirs), rank)
                _part(out, box).copy_(theirs)
        yield out


def _write(path: Path, planned: dict[str, Planned], tensors: Iterator[Tensor]) -> None:
    """Write aside, sync, rename, sync."""
    aside = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    make_folder(path.parent)
    outline = [
        shard.Entry(name, torch.empty(planned[name].shape, dtype=shard.DTYPES[planned[name].dtype], device="meta"))
        for name in _order(planned)
    ]
    try:
        with open(aside, "wb") as stream:
            stream.write(shard.layout(outline)[0])
            for tensor in tensors:
                stream.write(shard.memory(tensor))
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(path)
        sync_folder(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def _order(planned: dict[str, Planned]) -> list[str]:
    """As `shard.layout` puts them."""
    return sorted(planned, key=lambda name: (-shard.DTYPES[planned[name].dtype].itemsize, name))


def _part(out: Tensor, box: Box) -> Tensor:
    return (
        out[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))] if box.sizes else out
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
