"""The click model of `ps.py`, trained with Argosy as a user has it; every worker writes how fast it was.

usage: argosy run ... ps_train.py FOLDER IDS STEPS: `IDS` is zipf or uniform, `STEPS` are those of all workers together.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, relu
from torch.utils.data import DataLoader, Dataset

import argosy
from argosy.ps import Adagrad

sys.path.insert(0, str(Path(__file__).parent / "contenders"))
from ps_workload import BATCHES, DENSE, DIM, FIELDS, LAYERS, RATE, clicks_of

WARMUP = 10  # steps of each worker
SQUARES = 0.1

Batch = tuple[Tensor, Tensor, Tensor]


class Clicks(Dataset[Batch]):
    """The kept batches over and over, whole, as TensorFlow's dataset has them: a log of any length."""

    def __init__(self, popularity: str, batches: int) -> None:
        kept = clicks_of(popularity, 0)
        self._kept = [torch.from_numpy(part) for part in (kept.ids, kept.dense, kept.labels)]
        self._batches = batches

    def __len__(self) -> int:
        return self._batches

    def __getitem__(self, number: int) -> Batch:
        ids, dense, labels = (part[number % len(part)] for part in self._kept)
        return ids, dense, labels


class WideAndDeep(nn.Module):
    """As in `contenders/ps_tensorflow.py`."""

    def __init__(self) -> None:
        super().__init__()
        rule = Adagrad(RATE, initial_accumulator=SQUARES)
        self.wide = argosy.Embedding(1, name="wide", mode="sum", optimizer=rule)
        self.deep = argosy.Embedding(DIM, name="deep", optimizer=rule)
        self.linear = nn.Linear(DENSE, 1, bias=False)
        self.first = nn.Linear(FIELDS * DIM + DENSE, LAYERS[0])
        self.second = nn.Linear(*LAYERS)
        self.last = nn.Linear(LAYERS[1], 1)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        hidden = torch.cat([self.deep(ids).flatten(1), dense], 1)
        deep = self.last(relu(self.second(relu(self.first(hidden)))))
        return (self.wide(ids) + self.linear(dense) + deep).squeeze(1)


def main() -> None:
    folder, popularity, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    fleet = argosy.init()
    torch.manual_seed(0)
    model = WideAndDeep()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=RATE, initial_accumulator_value=SQUARES)
    loader = DataLoader(Clicks(popularity, steps), batch_size=1, shuffle=True, collate_fn=lambda items: items[0])
    model, optimizer, loader = fleet.distribute(model, optimizer, loader)
    times = []
    for ids, dense, labels in loader:
        optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(model(ids, dense), labels)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter())
    several = [
        end - begin for begin, end in zip(times[WARMUP::BATCHES], times[WARMUP + BATCHES :: BATCHES], strict=False)
    ]
    (folder / f"rank {fleet.rank}.json").write_text(json.dumps(several))
    fleet.mean(0.0)  # nobody leaves while others train


main()
