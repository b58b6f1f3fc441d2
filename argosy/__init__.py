"""Argosy: distributed PyTorch training of any kind, with a few changed lines.

    fleet = argosy.init()
    model, optimizer, loader = fleet.distribute(model, optimizer, loader)

The script's loop stays as it was. `argosy run --workers 4 train.py` starts it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argosy.comm.backend import register_backend
    from argosy.fleet import Fleet
    from argosy.joining import init
    from argosy.ps.embedding import Embedding
    from argosy.strategy import ConfigError, Strategy

__all__ = ["ConfigError", "Embedding", "Fleet", "Strategy", "init", "register_backend"]

_HOMES = {
    "ConfigError": "argosy.config",
    "Embedding": "argosy.ps.embedding",
    "Fleet": "argosy.fleet",
    "Strategy": "argosy.strategy",
    "init": "argosy.joining",
    "register_backend": "argosy.comm.backend",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the launcher and the command line need no torch."""
    import importlib

    if name == "ps":
        return importlib.import_module("argosy.ps")
    if name not in _HOMES:
        raise AttributeError(f"module 'argosy' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
