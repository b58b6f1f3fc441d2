"""Empty batches: what a worker receives that has no share of the last step of an epoch.

A DataLoader cannot load nothing, and only the script's collate function knows what a batch looks like. So a few
stand-ins are loaded, and everything in their batch that has as many entries as there are stand-ins is cut to none.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any

import numpy as np
from torch import Tensor

STAND_INS = 7  # a number that little else in a batch has for its length


def emptied(batch: Any) -> Any:
    """The batch of `STAND_INS` samples with none left in it: what a worker without a share receives.

    >>> import torch
    >>> emptied({"x": torch.ones(7, 3), "name": ["a"] * 7, "scale": 2})
    {'x': tensor([], size=(0, 3)), 'name': [], 'scale': 2}
    """
    empty, found = _emptied(batch)
    if not found:
        raise TypeError(
            f"this worker has no sample in the last step of the epoch, and a batch of type {type(batch).__name__} "
            f"cannot be emptied; collate into tensors, dicts, lists or tuples, or set drop_last=True"
        )
    return empty


def _emptied(value: Any) -> tuple[Any, bool]:
    """The value without samples, and whether there were any in it."""
    if isinstance(value, (Tensor, np.ndarray)):
        if STAND_INS not in value.shape:
            return value, False
        dim = value.shape.index(STAND_INS)  # mostly the first; the second where time comes first
        return value[(slice(None),) * dim + (slice(0),)], True
    if isinstance(value, MutableMapping):
        inner = {key: _emptied(item) for key, item in value.items()}
        kept = copy.copy(value)
        kept.update({key: item for key, (item, _) in inner.items()})
        return kept, any(found for _, found in inner.values())
    if isinstance(value, (list, tuple)):
        parts = [_emptied(item) for item in value]
        if any(found for _, found in parts):
            items = [item for item, _ in parts]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items), True
        if len(value) == STAND_INS:
            return type(value)(), True
    return value, False
