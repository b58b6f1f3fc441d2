"""Workers that make the same steps, of which rank 2 sleeps now and then; each writes which steps it sent gradients for.

Every gradient is for an id of its own, so that rank 0 can tell from the rows whose were applied. usage: late.py FOLDER
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import argosy

EPOCHS, STEPS = 2, 40


class Ledger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = argosy.Embedding(1, optimizer=argosy.ps.SGD(lr=1.0), initializer="zeros")
        self.scale = nn.Parameter(torch.zeros(5))

    def forward(self, ids):
        return self.rows(ids).sum() + self.scale.sum()


def identity(step, rank):
    return 1000 * rank + step


fleet = argosy.init()
model = Ledger()
loader = DataLoader(torch.arange(STEPS * fleet.world), batch_size=1, shuffle=True)
model, optimizer, loader = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
evaluation = fleet.distribute(DataLoader(torch.arange(5 * fleet.world), batch_size=1))
sent, evaluated, naps = [], 0, [3, 36]  # early in the first epoch, and over its end
for _ in range(EPOCHS):
    for _ in loader:
        at = fleet._cursor.at
        step = at.epoch * STEPS + at.step
        sleeps = fleet.rank == 2 and bool(naps) and step >= naps[0]
        time.sleep(0.4 if sleeps else 0.0 if fleet.rank == 2 else 0.02)  # awake, it is the first to be done
        if sleeps:
            naps.pop(0)
        optimizer.zero_grad()
        model(torch.tensor([identity(step, fleet.rank)])).backward()
        sent.append(step)
        optimizer.step()
    evaluated += sum(1 for _ in evaluation)
fleet._served.remote.settle()
fleet.mean(0.0)  # all are here
told = {"sent": sent, "steps": fleet.steps, "evaluated": evaluated, "scale": model.scale.tolist()}
if fleet.is_first:
    with torch.no_grad():
        ids = torch.tensor([[identity(s, rank) for rank in range(fleet.world)] for s in range(EPOCHS * STEPS)])
        told["applied"] = (model.rows(ids).squeeze(-1) != 0).int().tolist()
    told["stats"] = fleet._served.remote.stats()
(Path(sys.argv[1]) / f"rank{fleet.rank}.json").write_text(json.dumps(told))
