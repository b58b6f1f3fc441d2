"""Trains a small GPT under several strategies, one after the other, and writes the losses and parameters of each.

usage: large.py FOLDER STRATEGY... ; words before a strategy, as in `loop sgd|shard_stage=3`, name its optimizer, have
it trained in a loop that the script writes out, or choose another model: one whose own code uses parameters (`direct`),
or whose first layers are frozen, and which has buffers (`tuned`).
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import argosy
import argosy.optim

WORDS, LENGTH, WIDTH, HEADS, BLOCKS = 48, 16, 32, 4, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.qkv, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm2, self.fc, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        samples, length, _ = x.shape
        parts = self.qkv(self.norm1(x)).split(WIDTH, dim=2)
        q, k, v = (part.view(samples, length, HEADS, WIDTH // HEADS).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).reshape(samples, length, WIDTH))
        return x + self.out(F.gelu(self.fc(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        nn.init.normal_(self.token.weight, std=0.1)
        self.head.weight = self.token.weight

    def forward(self, tokens):
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Direct(GPT):
    """The head is no module, and neither is a scale."""

    def __init__(self):
        super().__init__()
        del self.head
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, tokens):
        x = (self.token(tokens) + self.place.weight[: tokens.shape[1]]) * self.scale
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)


class Tuned(GPT):
    """The first layers are frozen; one buffer is constant, and one follows the samples."""

    def __init__(self):
        super().__init__()
        for part in (self.token, self.place, self.blocks[0]):
            part.requires_grad_(False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, tokens):
        x = (self.token(tokens) + self.place(torch.arange(tokens.shape[1]))) * self.scale
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.seen += x.detach().mean((0, 1))
        return self.head(self.norm(x))


def loss_fn(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


OPTIMIZERS = {
    # A large eps: where gradients are next to nothing, Adam would make a step of any rounding.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "lars": lambda parameters: argosy.optim.LARS(parameters, lr=2.0, momentum=0.9),
    "lamb": lambda parameters: argosy.optim.LAMB(parameters, lr=1e-2, eps=1e-4),
}


def train(strategy, folder):
    words, _, line = strategy.rpartition("|")
    torch.manual_seed(0)
    with argosy.init(line) as fleet:
        begin = torch.randint(0, WORDS, (84, 1), generator=torch.Generator().manual_seed(1))
        text = (begin + 5 * torch.arange(LENGTH + 1)) % WORDS
        model = (Direct if "direct" in words else Tuned if "tuned" in words else GPT)()
        optimizer = OPTIMIZERS[next((word for word in words.split() if word in OPTIMIZERS), "adamw")](
            model.parameters()
        )
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=8)
        loader = DataLoader(TensorDataset(text[:, :-1], text[:, 1:]), batch_size=8, shuffle=True)
        model, optimizer, loader = fleet.distribute(model, optimizer, loader)
        losses = []
        for _ in range(2):
            for x, y in loader:  # 10 batches of 8 and 1 of 4
                if "loop" in words:
                    optimizer.zero_grad()
                    loss = loss_fn(model(x), y)
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    losses.append(float(fleet.mean(loss.detach())))
                else:
                    losses.append(float(fleet.step(x, y, loss_fn, clip_norm=0.5)))
                schedule.step()
        told = {name: whole(parameter) for name, parameter in model.named_parameters()}
        told["losses"] = torch.tensor(losses, dtype=torch.float64)
        save_file(told, folder / f"{strategy.replace('|', ' ')}, rank {fleet.rank}.safetensors")


def whole(parameter):
    parameter = parameter.detach()
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).clone().contiguous()


if __name__ == "__main__":
    for chosen in sys.argv[2:]:
        train(chosen, Path(sys.argv[1]))
