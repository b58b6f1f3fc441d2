"""What makes large batches and 16-bit numbers train well: LARS, LAMB, scaling rules, averages, loss scaling.

One concept per file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argosy.optim.average import Average
    from argosy.optim.lamb import LAMB
    from argosy.optim.lars import LARS

__all__ = ["LAMB", "LARS", "Average"]

_HOMES = {"Average": "argosy.optim.average", "LAMB": "argosy.optim.lamb", "LARS": "argosy.optim.lars"}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the command line reads this package's settings without torch."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'argosy.optim' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
