"""Workers that take samples by lease, of which rank 2 is slow; what they did is in their events."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader

import argosy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.ids = argosy.Embedding(2)
        self.top = nn.Linear(2, 1)

    def forward(self, ids):
        return self.top(self.ids(ids)).squeeze(1)


fleet = argosy.init()
model = Model()
loader = DataLoader(torch.arange(240), batch_size=2, shuffle=True)
model, optimizer, loader = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
for _ in range(2):
    for ids in loader:
        time.sleep(0.02 if fleet.rank == 2 else 0.001)
        fleet.step(ids, (ids % 2).float(), nn.functional.mse_loss)
fleet.mean(0.0)  # who waits here must not be waited for
told = fleet.staleness()
fleet.print(f"{told.median} {told.most} {sum(told.ages)}")
