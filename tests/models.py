"""Models in plain torch, as a user writes them: they know nothing of how they are trained."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FusedAttention(nn.Module):
    """Causal attention with one projection for q, k and v, as in nanoGPT."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head, self.n_embd, self.dropout = heads, width, dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (each.view(batch, time, self.n_head, width // self.n_head).transpose(1, 2) for each in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(batch, time, width)
        return self.resid_dropout(self.c_proj(y))


class SoftmaxAttention(nn.Module):
    """Causal attention written out, with a mask that it keeps, and a projection for each of q, k and v."""

    def __init__(self, width: int, heads: int, dropout: float, longest: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out_proj = nn.Linear(width, width)
        self.attn_dropout, self.dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.num_heads = heads
        self.register_buffer("bias", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        shape = (batch, time, self.num_heads, width // self.num_heads)
        q, k, v = (project(x).view(shape).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :time, :time] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(scores, dim=-1)) @ v
        return self.dropout(self.out_proj(y.transpose(1, 2).reshape(batch, time, width)))


class Mlp(nn.Module):
    """Four times as wide inside."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class GatedMlp(nn.Module):
    """Two projections of which one opens and closes the other, as in Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, 3 * width, bias=False)
        self.up_proj = nn.Linear(width, 3 * width, bias=False)
        self.down_proj = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, attn: nn.Module, mlp: nn.Module, width: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), attn
        self.ln_2, self.mlp = nn.LayerNorm(width), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """nanoGPT's shape: token and position embeddings, blocks, a head tied to the embedding."""

    def __init__(
        self,
        vocabulary: int = 64,
        width: int = 32,
        heads: int = 4,
        layers: int = 2,
        longest: int = 16,
        dropout: float = 0.0,
        tied: bool = True,
        written_out: bool = False,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(longest, width)
        self.drop = nn.Dropout(dropout)
        if written_out:
            blocks = [
                Block(SoftmaxAttention(width, heads, dropout, longest), GatedMlp(width), width) for _ in range(layers)
            ]
        else:
            blocks = [Block(FusedAttention(width, heads, dropout), Mlp(width, dropout), width) for _ in range(layers)]
        self.h = nn.ModuleList(blocks)
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.size(1)
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(time)))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Encoder(nn.Module):
    """torch's own transformer layers, with a mean over time at the end."""

    def __init__(self, width: int = 32, heads: int = 4, norm_first: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout, batch_first=True, norm_first=norm_first, activation="gelu"
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding).mean(1))


def mlp(width: int = 32) -> nn.Module:
    """Blocks of linear layers in a Sequential."""
    return nn.Sequential(
        nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU(),
        nn.Linear(width, 96), nn.Tanh(), nn.Dropout(0.0), nn.Linear(96, width),
        nn.LayerNorm(width), nn.Linear(width, 10),
    )  # fmt: skip
