"""Save in the background, and fail while it is being written: `failed_save.py FOLDER all|last`."""

import sys

import torch
from torch import nn

import argosy

fleet = argosy.init()
model = nn.Linear(512, 4096)
model, optimizer = fleet.distribute(model, torch.optim.Adam(model.parameters()))


def step() -> None:
    fleet.step(torch.ones(4, 512), torch.ones(4, 4096), nn.functional.mse_loss)


step()
fleet.save(sys.argv[1], model, optimizer, wait=False)
if sys.argv[2] == "all" or fleet.rank == fleet.world - 1:
    raise ValueError("a mistake of the script's")
for _ in range(1000):
    step()
