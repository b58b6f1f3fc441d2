"""Trains two equal models in stages, one after the other, each with its own optimizer, and prints their losses."""

import torch
from torch import nn

import argosy

fleet = argosy.init("pipeline=2")
x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
for _ in range(2):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    model, optimizer = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.5))
    losses = [float(fleet.step(x, x, nn.functional.mse_loss)) for _ in range(4)]
    fleet.print("losses", *losses)
try:
    both = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)]
    fleet.distribute(*both, torch.optim.SGD([*both[0].parameters(), *both[1].parameters()], lr=0.5))
except RuntimeError as error:
    fleet.print("refused:", error)
