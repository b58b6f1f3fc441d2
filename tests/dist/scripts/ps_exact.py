"""Joins a job twice: with gradients that tell steps apart, then with a learning rate that begins at 0."""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import argosy


class Net(nn.Module):
    """A weight, a row for each of two ids, and a weight that is frozen."""

    def __init__(self, rule: argosy.ps.RowRule) -> None:
        super().__init__()
        self.weight, self.frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
        self.rows = argosy.Embedding(2, initializer="constant:1", optimizer=rule)

    def forward(self, ids: Tensor, factor: Tensor) -> Tensor:
        return ((self.weight + self.rows(ids)) * self.frozen * factor[:, None]).sum()


def train(rule: argosy.ps.RowRule, optimizer: type[torch.optim.Optimizer], lr: float, factors: list[float]) -> Tensor:
    """What the weights and rows are in the end."""
    with argosy.init() as fleet:
        net = Net(rule)
        steps = optimizer(net.parameters(), lr=lr)  # type: ignore[call-arg]
        rises = torch.optim.lr_scheduler.LambdaLR(steps, lambda step: step / 4 if optimizer is torch.optim.AdamW else 1)
        samples = TensorDataset(torch.arange(len(factors)) % 2, torch.tensor(factors))
        net, steps, loader = fleet.distribute(net, steps, DataLoader(samples, batch_size=1))
        for ids, factor in loader:
            steps.zero_grad()
            net(ids, factor).backward()
            steps.step()
            rises.step()
        with torch.no_grad():
            return torch.stack([net.weight, net.frozen, *net.rows(torch.arange(2))])


sums = train(argosy.ps.SGD(lr=1.0), torch.optim.SGD, 1.0, [10.0**power for power in range(-2, 6)])
moments = train(argosy.ps.Adam(lr=0.1), torch.optim.AdamW, 0.1, [1.0, -2.0, 3.0, 0.5, -1.0, 4.0, 2.0])
Path(sys.argv[1]).write_text(json.dumps([sums.tolist(), moments.tolist()]))
