"""Attention under autocast, in fp32 where CPUs are slower at it in 16 bits.

torch's `scaled_dot_product_attention` takes longer in bf16 than in fp32, backward above all: without AMX always, with
AMX up to some 500 positions (128 of them: 41 ms instead of 16, for a layer of a GPT that is trained). So there autocast
casts its inputs the other way, and what comes out is of 16 bits as before. A GPT's step in bf16, against fp32, was 1.7
times as fast and is 1.8 times without AMX; with it, 1.9 and 2.1 (two workers).

It replaces autocast's own rule for this operator, in the whole process: the one place that sees attention wherever it
is called, in `nn.MultiheadAttention`, in a compiled model, or when a checkpointed layer is computed again in backward.
"""

from __future__ import annotations

import functools
import warnings
from typing import Final

import torch
from torch import Tensor

from argosy._native import tiles_are_hidden

_MANY_POSITIONS: Final = 512


@functools.cache
def attend_in_full() -> torch.library.Library:
    """Set the rule; it holds as long as what is returned, which is kept."""
    rules = torch.library.Library("aten", "IMPL", "AutocastCPU")
    with warnings.catch_warnings():  # that a rule is replaced is the purpose
        warnings.simplefilter("ignore")
        rules.impl("scaled_dot_product_attention", _attend, allow_override=True)
    return rules


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    short = torch.get_autocast_dtype("cpu")
    many = key.is_nested or key.shape[-2] >= _MANY_POSITIONS  # nested ones have no one length
    best = short if many and _has_tiles() else torch.float32
    tensors: list[Tensor | None] = [query, key, value, attn_mask]
    # As autocast has it: what is of 64 bits stays so, and a mask of booleans is none of its business.
    casts = not any(tensor.dtype == torch.float64 for tensor in tensors if tensor is not None)
    if casts:
        tensors = [
            tensor.to(best) if tensor is not None and tensor.is_floating_point() else tensor for tensor in tensors
        ]
    with torch.autocast("cpu", enabled=False):
        attend = torch.ops.aten.scaled_dot_product_attention
        seen: Tensor = attend(*tensors, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return seen.to(short) if casts else seen


@functools.cache
def _has_tiles() -> bool:
    return bool(torch.cpu.get_capabilities().get("amx_tile")) and not tiles_are_hidden()
