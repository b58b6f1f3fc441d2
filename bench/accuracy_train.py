"""The training that `accuracy.py` repeats: a script as a user would write it, started by `argosy run`."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import argosy
from argosy.compress.sparse import SparseCodec
from argosy.optim import LAMB, LARS

sys.path.insert(0, str(Path(__file__).parent / "contenders"))
from models import residual_net

DATA = Path(os.environ.get("BENCH_CIFAR", Path(__file__).resolve().parents[2] / "shared/data/cifar10_12k.npz"))


def images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """CIFAR-10's subset or, where that is not, small digits made to look like it."""
    if DATA.exists():
        stored = np.load(DATA)
        x, test_x = (torch.from_numpy(stored[key]).permute(0, 3, 1, 2).float() for key in ("train_x", "test_x"))
        y, test_y = (torch.from_numpy(stored[key]).long() for key in ("train_y", "test_y"))
    else:
        from sklearn.datasets import load_digits

        digits = load_digits()
        x = torch.from_numpy(digits.images).float()[:, None].repeat(1, 3, 2, 2)
        y = torch.from_numpy(digits.target).long()
        x, test_x, y, test_y = x[:1440], x[1440:], y[:1440], y[1440:]
    mean, deviation = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    return (x - mean) / deviation, y, (test_x - mean) / deviation, test_y


def augmented(x: Tensor, numbers: torch.Generator) -> Tensor:
    """Each image moved by up to four pixels, and half of them mirrored."""
    if not len(x):
        return x
    padded = nn.functional.pad(x, (4, 4, 4, 4))
    rows, columns = torch.randint(0, 9, (2, len(x)), generator=numbers)
    size = x.shape[-1]
    corners = zip(padded, rows.tolist(), columns.tolist(), strict=True)
    moved = torch.stack([image[:, row : row + size, column : column + size] for image, row, column in corners])
    mirrored = torch.rand(len(x), generator=numbers) < 0.5
    return torch.where(mirrored[:, None, None, None], moved.flip(-1), moved)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("told", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--optimizer", choices=["sgd", "lars", "adamw", "lamb"], default="sgd")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--lr-1d", type=float, default=0.1, help="of LARS, for biases and scales")
    parser.add_argument("--schedule", choices=["cosine", "constant"], default="cosine")
    parser.add_argument("--exchange", choices=["auto", "sparse"], default="auto", help="how sparse codecs send")
    options = parser.parse_args()
    SparseCodec.exchange = options.exchange
    fleet = argosy.init()
    torch.manual_seed(options.seed)
    x, y, test_x, test_y = images()
    # Channels last: a third less time.
    model = residual_net([16, 32, 64], blocks=3, stride=2).to(memory_format=torch.channels_last)
    decay = 5e-4
    if options.optimizer == "lars":
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
        groups = [{"params": matrices}, {"params": others, "lr": options.lr_1d}]
        optimizer: torch.optim.Optimizer = LARS(
            groups, lr=options.lr, momentum=0.9, nesterov=True, weight_decay=decay, trust_coefficient=0.01
        )
    elif options.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01)
    elif options.optimizer == "lamb":
        optimizer = LAMB(model.parameters(), lr=options.lr, weight_decay=0.01)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, nesterov=True, weight_decay=decay)
    loader = DataLoader(TensorDataset(x, y), batch_size=options.batch, shuffle=True)
    past = 0.0  # of the epochs; steps are not all alike where a batch grows
    cosine = options.schedule == "cosine"
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda _: 0.5 * (1 + math.cos(math.pi * past / options.epochs)) if cosine else 1.0
    )
    model, optimizer, loader = fleet.distribute(model, optimizer, loader)
    numbers = torch.Generator().manual_seed(options.seed * 1000 + fleet.rank)
    for epoch in range(options.epochs):
        model.train()
        steps = len(loader)
        for step, (batch, labels) in enumerate(loader, start=1):
            fleet.step(augmented(batch, numbers), labels, nn.functional.cross_entropy)
            past = epoch + step / steps
            schedule.step()
    model.eval()
    parts = zip(test_x.split(500), test_y.split(500), strict=True)
    with torch.no_grad(), fleet.averaged() if fleet.strategy.average != "none" else nullcontext():
        right = sum(int((model(part).argmax(1) == labels).sum()) for part, labels in parts)
    if fleet.is_first:
        options.told.write_text(json.dumps({"accuracy": 100 * right / len(test_y)}))


main()
