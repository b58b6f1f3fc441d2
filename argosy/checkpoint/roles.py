"""What a checkpoint calls the objects in it: by what they are, so that the order of saving does not matter."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_KINDS: dict[str, type] = {"model": nn.Module, "optimizer": Optimizer, "scheduler": LRScheduler}


def roles(parts: tuple[Any, ...], loader: type) -> dict[str, Any]:
    """A name for each object: model, optimizer, scheduler, loader; a second model is model2, and so on."""
    named: dict[str, Any] = {}
    for part in parts:
        kinds = {**_KINDS, "loader": loader}
        role = next((name for name, kind in kinds.items() if isinstance(part, kind)), None)
        if role is None:
            raise TypeError(f"a checkpoint holds models, optimizers, schedulers and loaders, not {type(part).__name__}")
        number = sum(name.rstrip("0123456789") == role for name in named) + 1
        named[role if number == 1 else f"{role}{number}"] = part
    if not named:
        raise TypeError("name what is to be saved or loaded: fleet.save(path, model, optimizer)")
    return named
