"""The models of the training benchmarks, in plain torch, and a batch for each."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

TOKENS, VOCABULARY = 128, 65


@dataclass(frozen=True)
class Task:
    """A model, what it is trained on, and its loss."""

    model: nn.Module
    x: Tensor
    y: Tensor

    def loss(self, output: Tensor) -> Tensor:
        """The mean over the batch."""
        return functional.cross_entropy(output.reshape(-1, output.shape[-1]), self.y.reshape(-1))


def task(name: str, batch: int, rank: int) -> Task:
    """A model with the same parameters everywhere, and a batch of the rank's own."""
    torch.manual_seed(0)
    known = {"mlp": (mlp, _rows), "resnet18": (resnet18, _images), "gpt": (gpt, _text), "tiny": (tiny, _few)}
    known |= {"wide gpt": (wide_gpt, _text), "narrow gpt": (narrow_gpt, _text)}
    model, make = known[name]
    net = model()
    torch.manual_seed(1 + rank)
    return Task(net, *make(batch))


def mlp() -> nn.Module:
    """25 million parameters in a few large matrices: much to send for little computing."""
    widths = [1024, *[2048] * 6, 1024]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(1024, 10))


def tiny() -> nn.Module:
    """40 parameters of next to no size: what a step costs whatever the model."""
    return nn.Sequential(*(nn.Linear(10, 10) for _ in range(20)))


class _Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        changes = stride > 1 or before != after
        self.skip = nn.Conv2d(before, after, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The block's own output, added to what it was given."""
        return functional.relu(self.body(x) + self.skip(x))


def residual_net(widths: list[int], blocks: int, stride: int = 1) -> nn.Module:
    """A ResNet for small images: stages of blocks, each stage half as large and as wide as told.

    With a stride of 2, the first convolution halves the images, which makes all the rest four times cheaper.
    """
    first = nn.Conv2d(3, widths[0], 3, stride, 1, bias=False)
    layers: list[nn.Module] = [first, nn.BatchNorm2d(widths[0]), nn.ReLU()]
    before = widths[0]
    for stage, width in enumerate(widths):
        for block in range(blocks):
            layers.append(_Residual(before, width, 2 if stage and not block else 1))
            before = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10))


def resnet18() -> nn.Module:
    """11 million parameters."""
    return residual_net([64, 128, 256, 512], blocks=2)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Look at what came before, then at itself."""
        batch, length, width = x.shape
        parts = self.attention(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class Gpt(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, words: int = VOCABULARY) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        """The next token's logits, at each place."""
        return self.head(self.norm(self.blocks(self.words(x) + self.places.weight[: x.shape[1]])))


def gpt() -> nn.Module:
    """10 million parameters."""
    return Gpt(width=384, layers=6, heads=6)


def wide_gpt() -> nn.Module:
    """25 million parameters in few layers."""
    return Gpt(width=1024, layers=2, heads=16, words=256)


def narrow_gpt() -> nn.Module:
    """The 10 million, with a vocabulary that can be divided."""
    return Gpt(width=384, layers=6, heads=6, words=256)


def deep_gpt(layers: int = 48, width: int = 384) -> nn.Module:
    """85 million parameters in many equal layers, by default."""
    return Gpt(width, layers, heads=6)


def _rows(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 1024), torch.randint(10, (batch,))


def _few(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 10), torch.randint(10, (batch,))


def _images(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))


def _text(batch: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(VOCABULARY, (batch, TOKENS + 1))
    return words[:, :-1], words[:, 1:]


def characters() -> Tensor:
    """A text to learn, in numbers: that which ARGOSY_TEXT names, or Python's own sources. Rare ones are the last."""
    named = os.environ.get("ARGOSY_TEXT")
    sources = [Path(named)] if named else sorted(Path(os.__file__).parent.glob("*.py"))
    text = "".join(source.read_text(encoding="utf-8", errors="replace") for source in sources)[:2_000_000]
    number = {character: at for at, (character, _) in enumerate(Counter(text).most_common(VOCABULARY - 1))}
    return torch.tensor([number.get(character, VOCABULARY - 1) for character in text])


def lesson_of(
    batch: int, rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]
) -> Callable[[], None]:
    """A training step on the next batch of a text, the same for every run; notes the loss."""
    text, numbers = characters(), torch.Generator().manual_seed(rank)

    def step() -> None:
        begins = torch.randint(len(text) - TOKENS - 1, (batch,), generator=numbers)
        words = torch.stack([text[begin : begin + TOKENS + 1] for begin in begins.tolist()])
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    return step


def step_of(job: Task, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A training step as a script has it."""

    def step() -> None:
        optimizer.zero_grad()
        job.loss(model(job.x)).backward()
        optimizer.step()

    return step


def optimizer_of(model: nn.Module, name: str = "sgd", fused: bool | None = None) -> torch.optim.Optimizer:
    """What the benchmarks train with; `fused` as the script of a user who knows of it has it."""
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, fused=fused)
