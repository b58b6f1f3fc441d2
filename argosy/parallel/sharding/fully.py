"""Sharding stages 2 and 3 are torch's `fully_shard`, module by module.

[Note: only on the wire]
torch's `reduce_dtype` is also what it adds gradients up in that are not reduced yet, of micro-batches for instance: in
bf16 a sum of 256 ones and another one is 256. Its parameters are told that they have no such type, and their group that
it has: then gradients are added up as they are, and cast when they are sent. Parameters that are not fp32 have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
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
    is the type that gradients of fp32 travel in, if not their own: see [Note: only on the wire].
    """
    policy: OffloadPolicy = CPUOffloadPolicy() if offload else OffloadPolicy()
    for name, module in modules.items():
        # What the root keeps is used at both ends of the model: torch's default holds it gathered in between.
        again = False if keep_gathered or not name else None
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=again,
            offload_policy=policy,
            shard_placement_fn=placed,
            ignored_params=whole,
        )
    if wire is not None:
        for module in modules.values():
            for group in cast(FSDPModule, module)._get_fsdp_state()._fsdp_param_groups:
                _send_as(wire, group)
    exchange_in_memory([cast(FSDPModule, module) for module in modules.values()], mesh)


def _send_as(wire: torch.dtype, group: FSDPParamGroup) -> None:
    """torch looks at types when it first runs a module: what it finds then is changed there."""
    find = group._init_mp_dtypes

    def find_and_change() -> None:
        find()
        if group._orig_dtype == torch.float32:
            group._reduce_dtype = wire

    group._init_mp_dtypes = find_and_change  # type: ignore[method-assign]
