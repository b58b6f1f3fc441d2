"""Trains the same small net under several strategies, one after the other, and writes what came of each.

usage: strategies.py FOLDER STRATEGY... ; a strategy may begin with `save:` or `load:`, to keep a checkpoint or go on.
"""

import hashlib
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import argosy


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 600), nn.BatchNorm1d(600), nn.ReLU(), nn.Linear(600, 60), nn.ReLU(), nn.Linear(60, 4)
    )


def averaged(fleet, model):
    with fleet.averaged():
        return [float(parameter.detach().double().sum()) for parameter in model.parameters()]


def train(strategy, folder):
    keep, _, line = strategy.rpartition("|")
    with argosy.init(line) as fleet:
        numbers = torch.Generator().manual_seed(1)
        x = torch.randn(448, 32, generator=numbers)
        y = (x @ torch.randn(32, 4, generator=numbers)).argmax(1)
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=1e-4)
        loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
        model, optimizer, loader = fleet.distribute(model, optimizer, loader)
        if keep == "load":
            fleet.load(folder / "kept", model, optimizer, loader)
        averages = averaged(fleet, model) if keep == "load" else None
        losses = []
        for _ in range(4):
            for batch, labels in loader:
                losses.append(float(fleet.step(batch, labels, nn.functional.cross_entropy)))
        if keep == "save":
            fleet.save(folder / "kept", model, optimizer, loader)
            averages = averaged(fleet, model)
        state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        model.eval()
        with torch.no_grad():
            right = float((model(x).argmax(1) == y).float().mean())
        weights = [float(parameter.detach().double().sum()) for parameter in model.parameters()]
        return {
            "losses": losses,
            "state": hashlib.sha256(state).hexdigest(),
            "right": right,
            "weights": weights,
            "averages": averages,
        }, fleet.rank


def main():
    folder = Path(sys.argv[1])
    told = {}
    for strategy in sys.argv[2:]:
        told[strategy], rank = train(strategy, folder)
    (folder / f"rank{rank}.json").write_text(json.dumps(told))


main()
