"""Small models in plain torch, as scripts have them, for the tests of pipelines."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and a multilayer perceptron, each with a residual."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        parts = self.qkv(self.ln1(x)).view(batch, length, 3, self.heads, dim // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    """Token and position embeddings, blocks, a norm, and a head that is tied to the token embedding."""

    def __init__(
        self, layers: int = 4, dim: int = 32, vocabulary: int = 64, length: int = 16, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, 4, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        _, length = ids.shape
        assert length <= self.positions.num_embeddings
        x = self.drop(self.tokens(ids) + self.positions(torch.arange(length, device=ids.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt_loss(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def gpt_batches(
    steps: int, samples: int, vocabulary: int = 64, length: int = 16, last: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """The same batches for everybody; the last one may be smaller. Targets follow from ids, so that a loss falls."""
    made = torch.Generator().manual_seed(5)
    sizes = [samples] * (steps - 1) + [last or samples]
    ids = [torch.randint(vocabulary, (size, length), generator=made) for size in sizes]
    return [(each, (each * 3 + 1) % vocabulary) for each in ids]


class Masked(nn.Module):
    """A chain whose blocks are given a mask made from the inputs and a second tensor that was computed before."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))
        self.first = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Adding(dim) for _ in range(3))
        self.last = nn.Linear(dim, 1)

    def forward(self, x: Tensor, *, flag: Tensor) -> dict[str, Tensor]:
        mask = (x.sum(1, keepdim=True) > 0).to(x.dtype)
        start = self.first(x) * self.scale
        x = start
        for block in self.blocks:
            x = block(x, start=start, mask=mask)
        return {"value": self.last(x), "flag": flag}


class Adding(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor, start: Tensor, mask: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x + start)) * mask


class Skipping(nn.Module):
    """Not a chain: what the first layer makes is used again behind the last one."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.middle = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        start = self.first(x)
        return self.middle(start) + start


class Convolutions(nn.Sequential):
    """Batch norms, and layers that change their input in place."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Flatten(),
            nn.Linear(4 * 36, 3),
        )


class Waiting(nn.Module):
    """A layer that waits in forward, as one that prepares features from files does."""

    def __init__(self, dim: int, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(dim, dim), seconds

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:  # not when its shapes are followed
            time.sleep(self.seconds)
        return torch.tanh(self.linear(x))


class _Slow(torch.autograd.Function):
    """The same tensor; its backward takes a while."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Slow(nn.Module):
    """A layer whose forward, backward for inputs and backward for weights take the same time, however busy a host."""

    def __init__(self, dim: int, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.eye(dim)), seconds

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            time.sleep(self.seconds)
        return F.linear(_Slow.apply(x, self.seconds), _Slow.apply(self.weight, self.seconds))
