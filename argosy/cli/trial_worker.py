"""A worker of a trial (`trial.py`), run as a program: RANK SIZE FOLDER FD."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch._C._distributed_c10d import FileStore

from argosy import _native
from argosy.comm.config import CommConfig
from argosy.comm.engine import EngineGroup
from argosy.comm.schedule import Collective
from argosy.comm.select import links_event

SIZES: Final = tuple(1 << power for power in range(10, 27, 2))
_ROUND_SECONDS: Final = 0.15
_JOIN_SECONDS: Final = 30.0


def main() -> None:
    """Be one of the workers."""
    rank, size, folder, parent = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    _native.guard(parent)
    config = CommConfig(timeout_seconds=_JOIN_SECONDS)
    store = FileStore(str(folder / "store"), size)
    group = EngineGroup.join(
        store, rank, size, config=config, secret=None, host_id=os.environ.get("ARGOSY_HOST_ID") or None
    )
    found = {"links": links_event(group.measure_links()), "sizes": [_timed(group, size_bytes) for size_bytes in SIZES]}
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    group.barrier()
    group.close()


def _timed(group: EngineGroup, size_bytes: int) -> dict[str, Any]:
    """All-reduces of one size: what was chosen, and the median of their times, on the slowest rank."""
    choice = group.selector.choose(Collective.ALL_REDUCE, size_bytes)
    tensor = group.empty(size_bytes // 4)
    for _ in range(3):
        group.all_reduce(tensor)
    # As often as the time allows; the ranks must agree how often.
    times = torch.tensor([min(max(_ROUND_SECONDS / max(choice.seconds, 1e-6), 5), 200)], dtype=torch.float64)
    group.all_reduce(times, "min")
    seconds = []
    for _ in range(int(times)):
        group.barrier()
        begin = time.perf_counter()
        group.all_reduce(tensor)
        seconds.append(time.perf_counter() - begin)
    median = torch.tensor([statistics.median(seconds)], dtype=torch.float64)
    group.all_reduce(median, "max")
    return choice.event(Collective.ALL_REDUCE, size_bytes) | {"measured_seconds": float(median)}


if __name__ == "__main__":
    main()
