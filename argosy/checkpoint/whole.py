"""Saving and loading with a group of workers: rank 0 keeps the files, the others are sent what they need.

No shared file system is assumed, and nothing depends on how many workers saved: what is written is the whole model.
All workers return, or all of them raise the same error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from argosy.checkpoint import files, tree
from argosy.checkpoint.files import CheckpointError
from argosy.comm.group import Group


def save(folder: Path, states: dict[str, Any], group: Group) -> None:
    """Write a checkpoint on rank 0; every worker returns when it is on disk."""
    _on_first(group, lambda: files.write(folder, states))


def load(folder: Path, group: Group) -> dict[str, Any]:
    """Read a checkpoint on rank 0; every worker returns its content."""
    tensors: dict[str, Tensor] = {}

    def outline() -> dict[str, Any]:
        form = tree.split(files.read(folder), tensors, "")
        return {"form": form, "tensors": [[n, str(t.dtype), list(t.shape)] for n, t in tensors.items()]}

    content = _on_first(group, outline)
    for name, dtype, shape in content["tensors"]:
        if group.rank != 0:
            tensors[name] = torch.empty(shape, dtype=_dtype(dtype))
        if tensors[name].numel():
            group.broadcast(tensors[name].view(-1).view(torch.uint8))
    return dict(tree.join(content["form"], tensors))


def _on_first(group: Group, work: Callable[[], Any]) -> Any:
    """Do something on rank 0 and tell every worker its result, or raise its error on every worker."""
    answer: bytes | None = None
    failure: Exception | None = None
    if group.rank == 0:
        try:
            answer = json.dumps({"result": work()}).encode()
        except Exception as error:  # whatever it is, the others must not wait for it
            failure = error
            answer = json.dumps({"error": str(error)}).encode()
    told = json.loads(group.broadcast_bytes(answer))
    if failure is not None:
        raise failure
    if "error" in told:
        raise CheckpointError(f"rank 0: {told['error']}")
    return told["result"]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype
