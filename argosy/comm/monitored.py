"""A barrier that tells who did not come.

It goes through the store that the group was made with, not through the engine: it is called when operations hang, and
must not wait behind one.
"""

from __future__ import annotations

import time
from datetime import timedelta

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

from argosy.comm.errors import CommError

GRACE_SECONDS = 2.0  # for rank 0's verdict to arrive, when all have begun to wait at the same time


def monitored_barrier(keys: Store, rank: int, size: int, timeout: timedelta) -> None:
    """Return when all ranks have called this with the same `keys`; raise, naming the others, when the time is up."""
    keys.set(f"came/{rank}", "")
    if rank == 0:
        missing = _missing(keys, size, timeout)
        verdict = f"{_named(missing)} did not come to the monitored barrier within {timeout.total_seconds():g} s"
        keys.set("verdict", verdict if missing else "")
        if missing:
            raise CommError(f"{verdict}; {size - len(missing)} of {size} ranks came")
        return
    try:
        keys.wait(["verdict"], timeout + timedelta(seconds=GRACE_SECONDS))
    except DistStoreError:
        raise CommError(
            f"rank 0 did not come to the monitored barrier within {timeout.total_seconds():g} s; rank {rank} did"
        ) from None
    if verdict := keys.get("verdict").decode():
        raise CommError(f"{verdict}; rank {rank} did")


def _missing(keys: Store, size: int, timeout: timedelta) -> list[int]:
    end = time.monotonic() + timeout.total_seconds()
    missing = []
    for other in range(1, size):
        try:
            keys.wait([f"came/{other}"], timedelta(seconds=max(end - time.monotonic(), 0.01)))
        except DistStoreError:
            missing.append(other)
    return missing


def _named(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
