"""Communication between the workers of a job.

    from argosy.comm import CommConfig, EngineGroup, PeerLost

are the low-level primitives, described in docs/primitives.md. To read the code, begin with `group.py` (the interface),
then `engine.py` (the group that runs in native code, `csrc/`). How a collective is described, proved, priced and drawn:
`schedule.py`, `algorithms/`, `verify.py`, `topology.py` and `cost.py`, `draw.py`; what of it a rank runs: `plans.py`.
How ranks find each other: `rendezvous.py`, with `board.py` and `sockets.py`; the whole job: `world.py`. How one of the
algorithms is chosen: `trials.py`, `measure.py`, `select.py`. The torch.distributed backend: `backend.py`, then
`torch_group.py`, `staging.py` and `work.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argosy.comm.config import CommConfig
    from argosy.comm.engine import EngineGroup
    from argosy.comm.errors import Aborted, CommError, Corrupted, DeadlinePassed, Mismatch, PeerLost
    from argosy.comm.group import Group, SoloGroup
    from argosy.comm.pending import Pending

_HOMES = {
    "Aborted": "errors",
    "CommConfig": "config",
    "CommError": "errors",
    "Corrupted": "errors",
    "DeadlinePassed": "errors",
    "EngineGroup": "engine",
    "Group": "group",
    "Mismatch": "errors",
    "PeerLost": "errors",
    "Pending": "pending",
    "SoloGroup": "group",
}
__all__ = [
    "Aborted",
    "CommConfig",
    "CommError",
    "Corrupted",
    "DeadlinePassed",
    "EngineGroup",
    "Group",
    "Mismatch",
    "PeerLost",
    "Pending",
    "SoloGroup",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: the strategy and the command line need no torch."""
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'argosy.comm' has no attribute {name!r}")
    return getattr(importlib.import_module(f"argosy.comm.{_HOMES[name]}"), name)
