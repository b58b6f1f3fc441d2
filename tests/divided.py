"""A model divided among ranks beside the same model in one process, to compare outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ranks import Place
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from argosy.comm.backend import register_backend
from argosy.parallel.tensor.apply import tensor_parallel
from argosy.parallel.tensor.config import TensorConfig


def joined(place: Place, *shape: int, names: tuple[str, ...] = ("tensor",)) -> DeviceMesh:
    register_backend()
    dist.init_process_group(
        "argosy", store=place.store, rank=place.rank, world_size=place.size, timeout=timedelta(seconds=60)
    )
    return init_device_mesh("cpu", shape or (place.size,), mesh_dim_names=names)


def check(make: Callable[[], nn.Module], mesh: DeviceMesh, *inputs: Tensor, plan: str = "auto", **config: Any) -> None:
    """Outputs and gradients are those of the undivided model, in training and not."""
    torch.manual_seed(3)
    alone = make()
    torch.manual_seed(3)
    model = make()
    divided = tensor_parallel(model, mesh, TensorConfig(tensor_plan=plan, **config))
    given = [each.clone().requires_grad_(each.is_floating_point()) for each in inputs]
    wanted, got = alone(*given), model(*inputs)
    assert type(got) is Tensor
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(4))
    (wanted * weights).sum().backward()
    (got * weights).sum().backward()
    for (name, one), other in zip(alone.named_parameters(), model.parameters(), strict=True):
        assert one.grad is not None
        assert isinstance(other.grad, DTensor)
        torch.testing.assert_close(
            other.grad.full_tensor(), one.grad, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
    divided.close()
