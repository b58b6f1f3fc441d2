"""The group of all workers of a job, and torch's view of the same workers.

Besides Argosy's own group, torch's default process group is made, on the same engine, so that DeviceMesh and the
script's own torch.distributed calls work. A script that has made torch's default group itself keeps it.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from datetime import timedelta

import torch.distributed as dist

# Its functions take the default group as a default argument when they are imported. Were that after the group is made
# (an optimizer's first step imports them), they would keep it, and its threads, alive while the interpreter ends.
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store
from torch.distributed.rendezvous import rendezvous

from argosy.comm.backend import register_backend
from argosy.comm.config import CommConfig
from argosy.comm.engine import EngineGroup
from argosy.comm.errors import CommError
from argosy.comm.group import Group, SoloGroup
from argosy.control.client import Client
from argosy.control.job import Job
from argosy.control.secret import Secret
from argosy.control.store import CoordinatorStore


def join_world(job: Job, config: CommConfig, leaving: ExitStack) -> Group:
    """Join the other workers; what is to be done when the group is left goes onto the stack."""
    if job.world == 1:
        return SoloGroup()
    if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != (job.rank, job.world):
        raise CommError(
            f"torch.distributed is already initialised as rank {dist.get_rank()} of {dist.get_world_size()}, and this "
            f"job has rank {job.rank} of {job.world}; call argosy.init() before init_process_group, or leave the "
            f"latter out"
        )
    store = _store(job, config, leaving)
    group = EngineGroup.join(
        PrefixStore("world", store),
        job.rank,
        job.world,
        config=config,
        secret=job.secret or _secret(),
        host_id=os.environ.get("ARGOSY_HOST_ID") or None,
    )
    leaving.callback(group.close)
    group.measure_links()
    if not dist.is_initialized():
        register_backend()
        timeout = timedelta(seconds=config.timeout_seconds)
        dist.init_process_group(
            "argosy", store=PrefixStore("torch", store), rank=job.rank, world_size=job.world, timeout=timeout
        )
        leaving.callback(_leave_torch)
    return group


def _store(job: Job, config: CommConfig, leaving: ExitStack) -> Store:
    """Where the workers find each other: at the coordinator, or where the variables that torchrun sets say."""
    if job.torchrun:
        if dist.is_initialized():
            return PrefixStore("argosy", _get_default_store())
        timeout = timedelta(seconds=config.timeout_seconds)
        store, _, _ = next(rendezvous("env://", job.rank, job.world, timeout=timeout))
        return PrefixStore("argosy", store)
    assert job.coordinator is not None
    assert job.secret is not None
    client = Client(job.coordinator, job.secret, who=f"rank {job.rank}", timeout_seconds=config.timeout_seconds)
    leaving.callback(client.close)
    # A script that leaves the job and joins it again must not find the keys of the first time.
    generation = client.add(f"joined/{job.rank}", 1)
    return CoordinatorStore(client, f"torch/{generation}")


def _secret() -> Secret | None:
    given = os.environ.get("ARGOSY_SECRET")
    return Secret.from_hex(given) if given else None


def _leave_torch() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # DTensor remembers how operations are divided, with the mesh; an equal mesh of the next job has other groups.
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
        clear_redistribute_planner_cache()
