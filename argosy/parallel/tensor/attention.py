"""Attention by heads: each rank has some of them.

`nn.MultiheadAttention` checks sizes and has paths of its own into native code, so its `forward` is replaced by one
that computes the same for some heads. A model's own attention runs as it is written, on DTensors; only the fused
operator, for which DTensor has no rule on CPUs, is run here on what ranks have.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from argosy.parallel.tensor.crossing import SumForward, plain, unwrap, wrap
from argosy.parallel.tensor.layers import Forward, local
from argosy.parallel.tensor.randomness import apart
from argosy.parallel.tensor.region import Region


def scaled_dot_product(
    region: Region,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`; tensors [..., heads, time, size] that are divided by heads stay so."""
    heads = query.dim() - 3
    if not all(isinstance(each, DTensor) and each.placements == (Shard(heads),) for each in (query, key, value)):
        query, key, value = plain(query), plain(key), plain(value)
        attn_mask = None if attn_mask is None else plain(attn_mask)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    q, k, v = (unwrap(cast(DTensor, each)) for each in (query, key, value))
    if attn_mask is not None:
        attn_mask = plain(attn_mask)
        if attn_mask.dim() > 2 and attn_mask.shape[-3] > 1:
            attn_mask = attn_mask.narrow(-3, region.rank * q.shape[-3], q.shape[-3])
    with apart(region.rank) if dropout_p else nullcontext():
        seen = F.scaled_dot_product_attention(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return wrap(seen, region.mesh, Shard(heads))


def multihead(module: nn.MultiheadAttention, region: Region, name: str) -> Forward:
    """What `nn.MultiheadAttention` computes, of this rank's heads; what they add to the output is summed."""
    heads, size = module.num_heads // region.size, module.head_dim

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise RuntimeError(f"{name}: is_causal=True is a hint about attn_mask, and needs it")
        batched, batch_dim = query.dim() == 3, 0 if module.batch_first else 1
        arranged = {id(each): _arranged(each, batch_dim) for each in (query, key, value)}
        q, k, v = (
            each.view(*each.shape[:2], heads, size).transpose(1, 2)
            for each in _project(module, region, *(arranged[id(each)] for each in (query, key, value)))
        )
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else _mask(attn_mask, key_padding_mask, q, region)
        dropout = module.dropout if module.training else 0.0
        weights = None
        with apart(region.rank) if dropout else nullcontext():
            if need_weights:
                scores = (q / math.sqrt(size)) @ k.transpose(-2, -1)
                weights = F.dropout(F.softmax(scores if mask is None else scores + mask, dim=-1), dropout)
                seen = weights @ v
            else:
                seen = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        joined = seen.transpose(1, 2).flatten(2)
        output = region.leave(F.linear(joined, local(module.out_proj.weight)), name)
        output = output if module.out_proj.bias is None else output + local(module.out_proj.bias)
        output = output.transpose(0, batch_dim)
        told = None if weights is None else _told(weights, average_attn_weights, module.num_heads, region)
        if not batched:
            output, told = output.squeeze(batch_dim), None if told is None else told.squeeze(0)
        return output, told

    return forward


def _arranged(tensor: Tensor, batch_dim: int) -> Tensor:
    """[batch, time, size], as which attention is computed."""
    return (tensor if tensor.dim() == 3 else tensor.unsqueeze(batch_dim)).transpose(0, batch_dim)


def _project(
    module: nn.MultiheadAttention, region: Region, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ...]:
    weight = local(module.in_proj_weight)
    bias = None if module.in_proj_bias is None else region.fused(local(module.in_proj_bias), 3)
    if query is key and key is value:
        return F.linear(region.enter(query), weight, bias).chunk(3, -1)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return tuple(
        F.linear(region.enter(each), some, shift)
        for each, some, shift in zip((query, key, value), weight.chunk(3), biases, strict=True)
    )


def _mask(attn_mask: Tensor | None, padding: Tensor | None, query: Tensor, region: Region) -> Tensor | None:
    """What is added to the scores of this rank's heads."""
    total = None
    if attn_mask is not None:
        total = _added(attn_mask, query.dtype)
        if total.dim() == 3:  # one for each sample and head
            heads = query.shape[1]
            total = total.unflatten(0, (query.shape[0], -1)).narrow(1, region.rank * heads, heads)
    if padding is not None:
        hidden = _added(padding, query.dtype).view(-1, 1, 1, padding.shape[-1])
        total = hidden if total is None else total + hidden
    return total


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -math.inf)


def _told(weights: Tensor, average: bool, heads: int, region: Region) -> Tensor:
    """The weights of all heads, or their mean over them."""
    if not average:
        return plain(wrap(weights, region.mesh, Shard(1)))
    mean: Tensor = SumForward.apply(weights.sum(1) / heads, region.group)  # type: ignore[no-untyped-call]
    return mean
