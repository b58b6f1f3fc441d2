"""Checkpoints of plain states, for tests that need no objects around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from argosy.checkpoint.parts import load_parts
from argosy.checkpoint.read import open_checkpoint
from argosy.checkpoint.save import Saver
from argosy.comm.group import Group, SoloGroup


class Holder:
    """Keeps what is loaded into it."""

    value: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        self.value = state


def write(path: str | Path, states: dict[str, Any], group: Group | None = None, **options: Any) -> None:
    """Save named states, and wait for what was earlier to be removed."""
    chosen = group or SoloGroup()
    saver = Saver(chosen, lambda: chosen)
    saver.save(path, states, **{"step": 0, **options})
    saver.finish()


def read(path: str | Path, group: Group | None = None) -> dict[str, Any]:
    """The states that a checkpoint holds."""
    opened = open_checkpoint(path, group or SoloGroup())
    holders = {role: Holder() for role in opened.manifest.parts}
    load_parts(opened, holders, [])
    return {role: holder.value for role, holder in holders.items()}
