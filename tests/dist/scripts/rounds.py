"""What `fleet` makes of rounds, of a gradient that is not finite, and of unequal workers, in one job after the other.

usage: rounds.py FOLDER
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import argosy


def loaded(folder, sync, with_optimizer):
    """A weight that was loaded as 10 and that nobody changes, after two rounds."""
    with argosy.init(sync) as fleet:
        model = nn.Linear(4, 1, bias=False)
        model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.0))
        fleet.load(folder / "tens", *([model, optimizer] if with_optimizer else [model]))
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).mean()
            fleet.report(loss)
            loss.backward()
            optimizer.step()
        return model.weight.tolist()


def save(folder):
    with argosy.init() as fleet:
        model = nn.Linear(4, 1, bias=False)
        nn.init.constant_(model.weight, 10.0)
        model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.0))
        fleet.save(folder / "tens", model, optimizer)


def frozen(sync):
    """How far a layer goes that is frozen after two rounds, and the other one."""
    with argosy.init(sync) as fleet:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05))
        x = torch.randn(8, 4)
        for step in range(10):
            if step == 4:
                model[0].requires_grad_(False)
                before = [layer.weight.detach().clone() for layer in model]
            optimizer.zero_grad()
            (model(x) - 3).square().mean().backward()
            optimizer.step()
        return [float((layer.weight - was).abs().max()) for layer, was in zip(model, before, strict=True)]


def shares(strategy, asks):
    """This worker's share of the last step; the second worker needs three times as long for a sample."""
    with argosy.init(strategy) as fleet:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        data = TensorDataset(torch.randn(24 * 64, 8), torch.randn(24 * 64, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer, loader = fleet.distribute(model, optimizer, DataLoader(data, 32))
        for x, y in loader:
            optimizer.zero_grad()
            time.sleep(0.0005 * (1 + 2 * fleet.rank) * len(x))
            loss = nn.functional.mse_loss(model(x), y)
            if asks:
                fleet.mean(loss)
            loss.backward()
            optimizer.step()
        return len(x), fleet.rank


def momentum(folder, strategy):
    """How far a step without a gradient takes a weight; the first job has trained with dgc before."""
    with argosy.init(strategy) as fleet:
        torch.manual_seed(0)
        model = nn.Linear(200, 100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        model, optimizer = fleet.distribute(model, optimizer)
        trains = strategy.startswith("compress")
        if not trains:
            fleet.load(folder / "moving", model, optimizer)
        before = model.weight.detach().clone()
        for _ in range(3 if trains else 1):
            optimizer.zero_grad()
            (model(torch.ones(2, 200)).mean() * (1.0 if trains else 0.0)).backward()
            optimizer.step()
        fleet.save(folder / ("moving" if trains else "moved"), model, optimizer)
        return float((model.weight - before).norm())


def overflow(folder, loads):
    """Three steps in fp16, of which one worker alone has a gradient in the second that is not finite."""
    with argosy.init("precision=fp16") as fleet:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if loads:
            fleet.load(folder / "scaled", model, optimizer)
        weights = []
        for step in range(3):
            times = float("inf") if (step, fleet.rank) == (1, 1) else 1.0
            fleet.step(torch.ones(2, 4), torch.zeros(2, 1), lambda out, y, times=times: (out * times - y).mean() / 10)
            weights.append(model.weight.flatten().tolist())
        fleet.save(folder / "scaled", model, optimizer)
        return weights


def main():
    folder = Path(sys.argv[1])
    save(folder)
    told = {
        "loaded": [loaded(folder, sync, both) for sync in ("sync=diloco:2", "sync=local:2") for both in (True, False)],
        "frozen": [frozen(sync) for sync in ("sync=diloco:2", "sync=diloco:2:int4", "sync=local:2")],
    }
    momentum(folder, "compress=dgc dgc_warmup_epochs=0")
    told["momentum"] = [momentum(folder, strategy) for strategy in ("", "shard_stage=1")]
    told["overflow"] = [overflow(folder, loads) for loads in (False, True)]
    told["shares"] = []
    for more, asks in (("", False), ("", True), (" sync_batchnorm=true", False)):
        share, rank = shares(f"balance=true{more}", asks)
        told["shares"].append(share)
    (folder / f"rank{rank}.json").write_text(json.dumps(told))


main()
