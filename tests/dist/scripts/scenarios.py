"""Several small trainings in one job, each telling every step's loss and the final state of each replica.

`scenarios.py OUT [NAME ...]` writes OUT/rank0.json, OUT/rank1.json, ...
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

import argosy

SAMPLES, BATCH, STEPS = 101, 10, 50  # the last step of an epoch holds a single sample


def data(seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, 1, 6, 6, generator=generator)
    return TensorDataset(x, (x.mean((1, 2, 3)) * 20).round().clamp(-2, 2).long() + 2)


class Cnn(nn.Module):
    """Reshapes its input in a way that an empty batch would not survive."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.spare = nn.Linear(3, 3)  # used by nobody: its gradient stays None
        self.late = nn.Linear(64, 5)
        self.late.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.late(torch.relu(self.conv(x)).view(x.size(0), -1))


def batches(loader):
    """Exactly STEPS batches, over as many epochs as that takes."""
    done = 0
    while done < STEPS:
        for batch in loader:
            yield done, batch
            done += 1
            if done == STEPS:
                return


def parts(fleet, model, lr=0.05, batch_size=BATCH):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    return fleet.distribute(model, optimizer, DataLoader(data(), batch_size=batch_size, shuffle=True))


def plain_loop(fleet, batch_size=BATCH):
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.Tanh(), nn.Linear(16, 5))
    model, optimizer, loader = parts(fleet, model, batch_size=batch_size)
    losses = []
    for _, (x, y) in batches(loader):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(fleet.mean(loss.item()))
    return model, losses


def whole_step(fleet):
    """fleet.step, a parameter that is unfrozen half-way, and one that is never used."""
    model, _, loader = parts(fleet, Cnn())
    losses = []
    for step, (x, y) in batches(loader):
        model.late.requires_grad_(step >= STEPS // 2)
        losses.append(fleet.step(x, y, cross_entropy).item())
    assert model.spare.weight.grad is None
    assert model.late.weight.grad is not None
    return model, losses


def clipped_and_scheduled(fleet):
    """Clipping by the global norm between backward and step, with a schedule for each step."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 5))
    model, optimizer, loader = parts(fleet, model, lr=0.2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS)
    losses = []
    for _, (x, y) in batches(loader):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        fleet.report(loss)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        losses.append(fleet.mean(loss).item())
    return model, losses


def accumulated(fleet):
    """Two backward passes to a step."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 5))
    model, optimizer, loader = parts(fleet, model)
    losses = []
    for step, (x, y) in batches(loader):
        loss = cross_entropy(model(x), y)
        (loss / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(fleet.mean(loss).item())
    return model, losses


def branching(fleet):
    """A parameter whose use depends on the data, so that some workers use it and others do not."""

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(36, 1), nn.Linear(36, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(1)
            rare = x[:, 0] > 1.2
            out = self.always(x)
            if rare.any():
                out = out + rare.unsqueeze(1) * self.sometimes(x)
            return out

    model, optimizer, loader = parts(fleet, Branch(), lr=0.002)
    losses = []
    for _, (x, y) in batches(loader):
        optimizer.zero_grad()
        loss = mse_loss(model(x), y.float().unsqueeze(1))
        loss.backward()
        optimizer.step()
        losses.append(fleet.mean(loss).item())
    return model, losses


def batch_norm(fleet):
    """Statistics are those of each worker's share, so only the replicas are compared."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    model, _, loader = parts(fleet, model)
    return model, [fleet.step(x, y, cross_entropy).item() for _, (x, y) in batches(loader)]


def moving_average(fleet):
    """A model that keeps a moving average of its inputs, a count of them, and a table that never changes."""

    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(36, 5)
            self.register_buffer("mean", torch.zeros(36))
            self.register_buffer("largest", torch.zeros((), dtype=torch.long))
            self.register_buffer("table", torch.rand(7) / 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x.flatten(1)
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
                self.largest.fill_(int(x.max() * 1000))
            return self.linear(x - self.mean)

    model, _, loader = parts(fleet, Average())
    table = model.table.clone()
    losses = [fleet.step(x, y, cross_entropy).item() for _, (x, y) in batches(loader)]
    assert torch.equal(model.table, table)
    return model, losses


def state(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    out = Path(sys.argv[1])
    names = sys.argv[2:] or [
        "plain_loop", "whole_step", "clipped_and_scheduled", "accumulated", "branching", "batch_norm",
        "moving_average",
    ]  # fmt: skip
    fleet = argosy.init(run_folder=out / "run")
    torch.manual_seed(fleet.rank)  # replicas start apart: it is Argosy that makes them the same
    if not fleet.is_first:
        torch.rand(5)
    results = {}
    for name in names:
        if fleet.is_first:
            torch.manual_seed(0)
        function, _, batch_size = name.partition(":")
        model, losses = globals()[function](fleet, *([int(batch_size)] if batch_size else []))
        results[name] = {"losses": losses, "state": state(model)}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"rank{fleet.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
