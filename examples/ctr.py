"""Will this be clicked? Wide & deep on a click log whose best possible AUC is known, as the log is made up.

Every id (of a user, an item, a site ...) has a row of its own in an embedding with an open vocabulary: nobody counts
the ids beforehand. The script is the same in one process and with servers that keep the rows:

    python examples/ctr.py
    argosy run --servers 2 --workers 4 --strategy "ps=async" examples/ctr.py

Wide & deep (Cheng et al., 2016): a weight for each id, which remembers, plus layers over embeddings, which generalise.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, relu
from torch.utils.data import DataLoader, Dataset

import argosy

FIELDS = {"user": 10_000, "item": 2_000, "site": 1_000, "advertiser": 200, "city": 100, "category": 40, "hour": 24}
PAIRS = [("advertiser", "hour"), ("city", "category")]  # of which one changes what the other means
DENSE = 4


@dataclass(frozen=True)
class ClickLog(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """What was shown (an id in each field, dense features), and whether it was clicked. `chances` are the true ones."""

    ids: Tensor
    dense: Tensor
    clicked: Tensor
    chances: Tensor

    @classmethod
    def made_up(cls, rows: int, seed: int) -> ClickLog:
        """Ids are as popular as Zipf's law has it: the k-th of a field with 1 / k^1.1."""
        world, random = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)
        keys = {name: _zipf(rows, size, random) for name, size in FIELDS.items()}
        dense = torch.randn(rows, DENSE, generator=random)
        logits = dense @ torch.tensor([0.6, -0.4, 0.2, 0.0]) - 1.6
        for name, size in FIELDS.items():
            logits += 0.35 * torch.randn(size, generator=world)[keys[name]]
        for one, other in PAIRS:
            taste, offer = (torch.randn(FIELDS[name], generator=world)[keys[name]] for name in (one, other))
            logits += 0.25 * taste * offer
        chances = logits.sigmoid()
        clicked = (torch.rand(rows, generator=random) < chances).float()
        ids = torch.stack([_hashed(number, keys[name]) for number, name in enumerate(FIELDS)], 1)
        return cls(ids, dense, clicked, chances)

    def part(self, begin: int, end: int) -> ClickLog:
        return ClickLog(self.ids[begin:end], self.dense[begin:end], self.clicked[begin:end], self.chances[begin:end])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.ids[number], self.dense[number], self.clicked[number]

    def __getitems__(self, numbers: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """A batch at once: the DataLoader asks for it where it is there."""
        chosen = torch.tensor(numbers)
        return self.ids[chosen], self.dense[chosen], self.clicked[chosen]


def as_it_is(batch: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return batch


def _zipf(rows: int, size: int, random: torch.Generator) -> Tensor:
    share = torch.arange(1, size + 1, dtype=torch.float64).pow(-1.1).cumsum(0)
    drawn = torch.rand(rows, generator=random, dtype=torch.float64) * share[-1]
    return torch.searchsorted(share, drawn).clamp_(max=size - 1)


def _hashed(field: int, keys: Tensor) -> Tensor:
    """64 bits for a field and a key, as a log's text would be hashed (splitmix64)."""
    x = (keys + (field << 32) + 1) * -0x61C8864680B583EB
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31 & (1 << 33) - 1)


class WideAndDeep(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.wide = argosy.Embedding(
            1, name="wide", mode="sum", initializer="zeros", optimizer=argosy.ps.Adagrad(lr=0.1)
        )
        self.deep = argosy.Embedding(dim, name="deep", initializer="normal:0.05", optimizer=argosy.ps.Adagrad(lr=0.1))
        self.linear = nn.Linear(DENSE, 1)
        self.first = nn.Linear(len(FIELDS) * dim + DENSE, 64)
        self.second = nn.Linear(64, 32)
        self.last = nn.Linear(32, 1)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        hidden = torch.cat([self.deep(ids).flatten(1), dense], 1)
        deep = self.last(relu(self.second(relu(self.first(hidden)))))
        return (self.wide(ids) + self.linear(dense) + deep).squeeze(1)


def auc(scores: Tensor, clicked: Tensor) -> float:
    """The chance that of a click and a non-click, the click has the higher score.

    >>> auc(torch.tensor([0.1, 0.9, 0.5]), torch.tensor([0.0, 1.0, 1.0]))
    1.0
    """
    clicks = int(clicked.sum())
    places = torch.empty(len(scores), dtype=torch.float64)
    places[scores.argsort()] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    above = float(places[clicked.bool()].sum()) - clicks * (clicks + 1) / 2
    return above / (clicks * (len(scores) - clicks))


def scores_of(model: nn.Module, log: ClickLog, batch: int) -> Tensor:
    with torch.no_grad():
        several = zip(log.ids.split(batch), log.dense.split(batch), strict=True)
        return torch.cat([model(ids, dense) for ids, dense in several])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=800_000, help="of the log; a tenth more are for the test")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--dim", type=int, default=8, help="numbers in a row of the deep part")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    fleet = argosy.init()
    torch.manual_seed(options.seed)
    log = ClickLog.made_up(options.rows + options.rows // 10, options.seed)
    train, test = log.part(0, options.rows), log.part(options.rows, len(log))
    model = WideAndDeep(options.dim)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    loader = DataLoader(train, batch_size=options.batch, shuffle=True, collate_fn=as_it_is)
    model, optimizer, loader = fleet.distribute(model, optimizer, loader)

    begun = time.perf_counter()
    loss = torch.tensor(0.0)
    for epoch in range(options.epochs):
        for step, (ids, dense, clicked) in enumerate(loader):
            optimizer.zero_grad()
            loss = binary_cross_entropy_with_logits(model(ids, dense), clicked)
            fleet.report(loss)
            loss.backward()
            optimizer.step()
            if step % 100 == 0:
                fleet.print(f"epoch {epoch} step {step} loss {loss:.4f}")
    seconds = fleet.mean(time.perf_counter() - begun)  # all are here when it returns

    if fleet.is_first:
        result = {
            "auc": auc(scores_of(model, test, options.batch), test.clicked),
            "best_auc": auc(test.chances, test.clicked),
            "rows": model.deep.rows,
            "samples_per_second": options.rows * options.epochs / seconds,
        }
        print(f"test AUC {result['auc']:.4f}; with the true chances, the best possible, {result['best_auc']:.4f}")
        print(f"{result['rows']} ids have a row; {result['samples_per_second']:.0f} samples per second", flush=True)
        (fleet.run_folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
