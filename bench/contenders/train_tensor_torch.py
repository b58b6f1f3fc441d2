"""The same plan of tensor parallelism as torch's users write it: `parallelize_module`, on Gloo.

torch divides a fused projection in one piece, so here its rows lie head by head, and the blocks compute with their own
heads: plain tensors between the layers, which is the fastest that torch's styles have.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from models import Block, Gpt, step_of, task
from serving import Operation, Seat, serve
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch_tensors import PATIENCE, meet


def divide(model: nn.Module, mesh: DeviceMesh) -> None:
    """Columns, then rows, in attention and MLP; the vocabulary at both ends."""
    assert isinstance(model, Gpt)
    plan: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention": ColwiseParallel(),
        "blocks.*.out": RowwiseParallel(),
        "blocks.*.mlp.0": ColwiseParallel(),
        "blocks.*.mlp.2": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        block.forward = _forward(block, block.heads // mesh.size())


def _forward(block: Block, heads: int) -> Any:
    def forward(x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = block.attention(block.before_attention(x)).view(batch, length, heads, 3, -1)
        query, key, value = parts.permute(3, 0, 2, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + block.out(seen.transpose(1, 2).reshape(batch, length, -1))
        return x + block.mlp(block.before_mlp(x))

    return forward


def main() -> None:
    seat = Seat.from_arguments()
    store = meet(seat)
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.size, timeout=PATIENCE)
    mesh = init_device_mesh("cpu", (seat.size,), mesh_dim_names=("tensor",))

    def make(wanted: dict[str, Any]) -> Operation:
        job = task(wanted["model"], wanted["batch"], rank=0)  # all ranks see the same samples
        divide(job.model, mesh)
        optimizer = torch.optim.SGD(job.model.parameters(), lr=1e-4, momentum=0.9)  # faster than with foreach=True
        return Operation(step_of(job, job.model, optimizer), dist.barrier)

    serve(seat, make, leave=dist.destroy_process_group)


main()
