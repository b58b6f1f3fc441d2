"""Trains a small click model with open-vocabulary embeddings; rank 0 writes its losses, parameters, rows and AUC.

usage: ps.py FILE [EPOCHS]. With more than two, learning rates fall to nothing: how old gradients were, which is another
thing in each run of an asynchronous mode, then matters little to what has been learnt in the end.
"""

import sys

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import argosy
from argosy.ps import SGD, Adagrad

FIELDS, WORDS = 3, 60


class Clicks(nn.Module):
    def __init__(self, schedule):
        super().__init__()
        deep, wide = Adagrad(lr=0.1, schedule=schedule), SGD(lr=0.5, schedule=schedule)
        self.deep = argosy.Embedding(8, optimizer=deep, initializer="uniform:0.1")
        self.wide = argosy.Embedding(1, optimizer=wide, mode="sum", initializer="zeros")
        self.hidden, self.out = nn.Linear(8 * FIELDS, 16), nn.Linear(16, 1)

    def forward(self, ids):
        deep = self.out(torch.relu(self.hidden(self.deep(ids).flatten(1))))
        return (deep + self.wide(ids)).squeeze(1)


def log(samples):
    """Ids of a few fields, far apart, and clicks that a sum of their own weights makes likely."""
    numbers = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (samples, FIELDS), generator=numbers)
    weights = torch.randn(FIELDS, WORDS, generator=numbers)
    score = sum(weights[field][words[:, field]] for field in range(FIELDS))
    clicks = torch.rand(samples, generator=numbers) < torch.sigmoid(1.5 * score)
    return (words + WORDS * torch.arange(FIELDS)) * 1_000_003**2 - (1 << 60), clicks.float()


def auc(scores, clicks):
    ranks = torch.empty(len(scores), dtype=torch.float64)
    ranks[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    ones = int(clicks.sum())
    return float((ranks[clicks > 0].sum() - ones * (ones + 1) / 2) / (ones * (len(clicks) - ones)))


fleet = argosy.init()
torch.manual_seed(0)
ids, clicks = log(6000)
train, test = slice(0, 1603), slice(1603, None)
epochs = int(sys.argv[2]) if len(sys.argv) > 2 else 2
steps = epochs * 51 // fleet.world
falls = epochs > 2
model = Clicks(f"linear:{steps}" if falls else "")
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-4)
loader = DataLoader(TensorDataset(ids[train], clicks[train]), batch_size=32, shuffle=True)
model, optimizer, loader = fleet.distribute(model, optimizer, loader)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0 if falls else 1.0, total_iters=steps)
losses = []
for _ in range(epochs):
    for x, y in loader:
        losses.append(float(fleet.step(x, y, nn.functional.binary_cross_entropy_with_logits)))
        schedule.step()
if fleet.is_first:
    with torch.no_grad():
        told = {name: parameter.clone() for name, parameter in model.named_parameters()}
        known = ids[train].unique()
        told["deep"], told["wide"] = model.deep(known), model.wide(known.view(-1, 1))
        told["auc"] = torch.tensor(auc(model(ids[test]), clicks[test]))
        told["rows"] = torch.tensor([model.deep.rows, len(known)])
    save_file({**told, "losses": torch.tensor(losses)}, sys.argv[1])
