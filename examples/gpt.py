"""A small GPT in plain torch, trained on the sources of Python's standard library, which every machine has.

The model knows nothing of Argosy, and the script is the same in every mode; only the strategy changes:

    python examples/gpt.py
    argosy run --workers 2 examples/gpt.py
    argosy run --workers 4 --strategy "shard_stage=3" examples/gpt.py
    argosy run --workers 2 --strategy "tensor=2" examples/gpt.py
    argosy run --workers 2 --strategy "pipeline=2 schedule=zero-bubble" examples/gpt.py
    argosy run --workers 8 --strategy "pipeline=2 tensor=2 shard_stage=3" examples/gpt.py

With `--save FOLDER` it goes on from the newest checkpoint there, if there is one, up to `--steps` in all.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import argosy

BYTES = 256  # the vocabulary: text is read byte by byte


class Attention(nn.Module):
    """Each position looks at those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        by_head = (part.view(samples, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(width, 2))
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(*by_head, dropout_p=dropout, is_causal=True)
        return self.proj(seen.transpose(1, 2).reshape(samples, length, width))


class Block(nn.Module):
    """Attention, then a layer of neurons, each added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.neurons = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.neurons(self.norm2(x)))


class GPT(nn.Module):
    """Says for each position what comes next."""

    def __init__(self, layers: int = 4, width: int = 128, heads: int = 4, length: int = 128, dropout: float = 0.0):
        super().__init__()
        self.token, self.place = nn.Embedding(BYTES, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.place.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Source(Dataset[tuple[Tensor, Tensor]]):
    """The standard library's modules, cut into stretches of equal length."""

    def __init__(self, length: int, kbytes: int) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[: kbytes << 10]
        self.tokens, self.length = torch.frombuffer(bytearray(text), dtype=torch.uint8), length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        stretch = self.tokens[number * self.length :][: self.length + 1].long()
        return stretch[:-1], stretch[1:]


def surprise(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of the next byte."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--kbytes", type=int, default=512, help="of text")
    parser.add_argument("--steps", type=int, default=200, help="in all, those of earlier runs included")
    parser.add_argument("--save", metavar="FOLDER", help="keep checkpoints here, and go on from the newest")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    options = parser.parse_args()

    fleet = argosy.init()
    torch.manual_seed(0)
    model = GPT(options.layers, options.width, options.heads, options.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Source(options.length, options.kbytes), batch_size=options.batch, shuffle=True)
    model, optimizer, loader = fleet.distribute(model, optimizer, loader)
    if options.save and fleet.load(options.save, model, optimizer, loader, missing_ok=True):
        fleet.print(f"going on after {fleet.steps} steps")

    steps = fleet.steps
    while steps < options.steps:
        for tokens, targets in loader:
            loss = fleet.step(tokens, targets, surprise, clip_norm=1.0)
            if fleet.steps == steps:  # the step has further batches: see `accumulate`
                continue
            if steps % 20 == 0:
                fleet.print(f"step {steps} loss {loss:.4f}")
            steps = fleet.steps
            if options.save and (steps % options.save_every == 0 or steps == options.steps):
                fleet.save(options.save, model, optimizer, loader, wait=False, keep=3)
            if steps == options.steps:
                fleet.print(f"after {steps} steps: loss {loss:.4f}")
                break
    fleet.saved()


main()
