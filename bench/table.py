"""A table in this process against the machine's random-access limit: the same reads and writes on a plain array.

`measure_table()` is for `bench/ps.py`; as a script, this prints what it measures.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from argosy import _native

ROWS, DIM, IDS = 1_000_000, 16, 106_496  # a batch of 4096 samples with 26 ids each
HEAD_FLOATS = 5  # of a row: id and counters


def measure_table(rows: int = ROWS, dim: int = DIM, count: int = IDS, repeats: int = 15) -> dict[str, float]:
    """Milliseconds of a lookup and an Adagrad update of distinct random ids, here and at the limit; the least of all.

    `of_limit` is the ratio of the two sums. An update is of the ids that were looked up before it, as in training; the
    array of the limit is gone through in between, so that their rows are not in the cache.
    """
    initial = {"initializer": "uniform", "low_or_mean": -0.01, "high_or_std": 0.01}
    table = _native.Table(_native.table_config(dim, "adagrad", lr=0.01, eps=1e-10, **initial))
    generator = torch.Generator().manual_seed(1)
    vocabulary = torch.randint(-(2**62), 2**62, (rows,), generator=generator).unique()
    fill(table, vocabulary, dim)
    gradients, out = torch.randn(count, dim, generator=generator), torch.empty(count, dim)
    seconds: dict[str, list[float]] = {name: [] for name in ("pull", "push", "gather", "scatter")}
    for _ in range(repeats):
        ids = drawn(vocabulary, count, generator)
        seconds["pull"].append(timed(table.pull, ids, out))
        gather, scatter = _native.random_access_limit(rows, HEAD_FLOATS, dim, dim, count, 1)
        seconds["push"].append(timed(table.push, ids, gradients))
        seconds["gather"].append(gather)
        seconds["scatter"].append(scatter)
    best = {name: min(times) * 1e3 for name, times in seconds.items()}
    return {f"{name}_ms": value for name, value in best.items()} | {
        "of_limit": (best["gather"] + best["scatter"]) / (best["pull"] + best["push"])
    }


def measure_distinct(count: int = IDS, kinds: int = ROWS, repeats: int = 15) -> dict[str, float]:
    """Milliseconds of making a batch's ids distinct, uniform ones and those of Zipf's law with exponent 1.1."""
    generator, distinct = torch.Generator().manual_seed(1), _native.Distinct()
    weights = torch.arange(1, kinds + 1, dtype=torch.float64) ** -1.1
    best = {}
    for name, shares in (("uniform", torch.ones(kinds)), ("zipf", weights)):
        ids = torch.multinomial(shares, count, replacement=True, generator=generator)
        ids = ids * 0x9E3779B97F4A7C1 + 12345  # as hashed features are
        best[f"distinct_{name}_ms"] = min(timed(distinct.find, ids) for _ in range(repeats)) * 1e3
    return best


def measure_growth(rows: int = 20_000_000, dim: int = 8, piece: int = 256) -> dict[str, float]:
    """The longest push of a small request while a table grows, and its memory against its payload at the worst."""
    table = _native.Table(_native.table_config(dim, "sgd", lr=0.01))
    generator = torch.Generator().manual_seed(1)
    longest, worst, gradients = 0.0, 0.0, torch.full((piece, dim), 0.01)
    for _ in range(rows // (piece * 256)):
        for ids in torch.randint(-(2**62), 2**62, (256, piece), generator=generator):
            longest = max(longest, timed(table.push, ids, gradients))
        if table.rows > rows // 20:
            worst = max(worst, table.bytes / table.payload_bytes)
    return {"longest_push_ms": longest * 1e3, "bytes_of_payload": worst, "rows": float(table.rows)}


def fill(table: _native.Table, ids: Tensor, dim: int, piece: int = 1 << 16) -> None:
    """Push all ids once."""
    gradients = torch.full((piece, dim), 0.01)
    for part in ids.split(piece):
        table.push(part.data_ptr(), part.numel(), gradients.data_ptr())


def drawn(vocabulary: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Distinct ids in a random order."""
    return vocabulary[torch.randperm(vocabulary.numel(), generator=generator)[:count]].contiguous()


def timed(work: Callable[..., object], ids: Tensor, *more: Tensor) -> float:
    """The seconds of a call with ids and other tensors, as addresses."""
    arguments = (ids.data_ptr(), ids.numel(), *(tensor.data_ptr() for tensor in more))
    begin = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - begin


if __name__ == "__main__":
    torch.set_num_threads(1)
    for measure in (measure_table, measure_distinct, measure_growth):
        print(" ".join(f"{name} {value:.3f}" for name, value in measure().items()))
