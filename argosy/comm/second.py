"""A second group of the same workers, for a thread beside training: operations of one group have one order.

The workers meet again where torch's default group met, so that nothing has to be handed down.
"""

from __future__ import annotations

import os

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from argosy.comm.config import CommConfig
from argosy.comm.engine import EngineGroup
from argosy.comm.group import Group, SoloGroup
from argosy.control.secret import Secret


def join_second(group: Group, config: CommConfig, name: str) -> Group:
    """Join all workers of a job again, under another name. All of them call it, in the thread that trains."""
    if group.size == 1:
        return SoloGroup()
    secret = os.environ.get("ARGOSY_SECRET")
    return EngineGroup.join(
        PrefixStore(f"second/{name}", _get_default_store()),
        group.rank,
        group.size,
        config=config,
        secret=Secret.from_hex(secret) if secret else None,
        host_id=os.environ.get("ARGOSY_HOST_ID") or None,
    )
