"""Sharding stages 2 and 3 are torch's `fully_shard`, module by module."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from argosy.parallel.sharding.exchange import exchange_in_memory


def shard_modules(
    modules: dict[str, nn.Module],
    mesh: DeviceMesh,
    *,
    keep_gathered: bool,
    offload: bool,
    placed: Callable[[nn.Parameter], Shard | None] | None = None,
    whole: set[nn.Parameter] | None = None,
    wire: torch.dtype | None = None,
) -> None:
    """Shard each of these modules as a whole, in this order; the last one is the root.

    `mesh` has the shard axis, and the data axis before it if there are replicas. `placed` says along which dimension a
    parameter is divided, if not the first; `whole` are those that every worker keeps, and whoever calls reduces. `wire`
    is the type that gradients travel in, if not their own.
    """
    policy: OffloadPolicy = CPUOffloadPolicy() if offload else OffloadPolicy()
    for name, module in modules.items():
        # What the root keeps is used at both ends of the model: torch's default holds it gathered in between.
        again = False if keep_gathered or not name else None
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=again,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=wire),
            offload_policy=policy,
            shard_placement_fn=placed,
            ignored_params=whole,
        )
    exchange_in_memory([cast(FSDPModule, module) for module in modules.values()], mesh)
