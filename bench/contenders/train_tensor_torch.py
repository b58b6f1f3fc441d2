"""The same plan of tensor parallelism as torch's users write it: `parallelize_module`, on Gloo.

torch divides a fused projection in one piece, so here its rows lie head by head, and the blocks compute with their own
heads: plain tensors between the layers, which is the fastest that torch's styles have.
"""

from __future__ import annotations

from typing import Any

from models import Block, Gpt
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch_tensors import train_divided


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


train_divided(divide, foreach=None)  # DTensors and plain ones do not go together in a `foreach` step
