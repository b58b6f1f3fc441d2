"""What a checkpoint calls the objects in it: by what they are, so that models and optimizers may come in any order."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_KINDS: dict[str, type] = {"model": nn.Module, "optimizer": Optimizer, "scheduler": LRScheduler}


def roles(parts: tuple[Any, ...]) -> dict[str, Any]:
    """A name for each object: model, optimizer, scheduler, or its class (loader); a second model is model2."""
    named: dict[str, Any] = {}
    for part in parts:
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise TypeError(f"a checkpoint holds models, optimizers, schedulers, loaders, not {type(part).__name__}")
        known = (name for name, kind in _KINDS.items() if isinstance(part, kind))
        role = next(known, type(part).__name__.lower())
        name, number = role, 1
        while name in named:
            number += 1
            name = f"{role}{number}"
        named[name] = part
    if not named:
        raise TypeError("name what is to be saved or loaded: fleet.save(path, model, optimizer)")
    return named
