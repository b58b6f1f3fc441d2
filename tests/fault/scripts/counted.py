"""Workers whose table counts how often each sample was applied; rank 1 ends its first loop early, as arguments say.

It is slow, so that it tells of each batch when it is done. Arguments: a folder; how it ends; after how many batches.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import argosy
from argosy.data.progress import TELL_SECONDS

folder, how, batches = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
SAMPLES, EPOCHS = 180, 2


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Parameter(torch.zeros(1))
        self.rows = argosy.Embedding(1, initializer="zeros", optimizer=argosy.ps.SGD(lr=1.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return -self.rows(ids).sum() - self.steps.sum()


fleet = argosy.init()
(folder / f"{os.getpid()}.pid").touch()
model = Counts()
model, optimizer, loader = fleet.distribute(
    model, torch.optim.SGD(model.parameters(), lr=1.0), DataLoader(range(SAMPLES), batch_size=2, shuffle=True)
)
fleet.mean(0.0)  # all begin together
count = 0
for _ in range(EPOCHS):
    for batch in loader:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
        count += 1
        if fleet.rank == 1 and count == batches:
            (folder / "in_hand.json").write_text(json.dumps(batch.tolist()))
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit":
                sys.exit(0)
            break
        time.sleep(1.5 * TELL_SECONDS if fleet.rank == 1 and count < batches else 0.04)
with torch.no_grad():
    times = model.rows(torch.arange(SAMPLES)).view(-1).tolist()
(folder / f"rank{fleet.rank}.json").write_text(json.dumps(times))
