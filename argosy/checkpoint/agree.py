"""How workers agree while they save and load: all of them go on, or all of them raise the same error.

Whatever one worker does that can fail is done through `together`. What may take longer than the group waits for its
peers, such as writing hundreds of gigabytes, is done through `patiently`: the group hears of everybody meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from argosy.checkpoint.errors import CheckpointError
from argosy.comm.errors import CommError
from argosy.comm.group import Group

_ROUND_SECONDS: Final = 10.0


def gather(group: Group, value: Any) -> list[Any]:
    """The JSON values of all workers, by rank. What several of them have alike travels once, and is one object here."""
    if group.size == 1:
        return [json.loads(json.dumps(value))]
    data = json.dumps(value).encode()
    digests = [
        bytes(each.tolist())
        for each in group.all_gather(torch.tensor(list(hashlib.sha256(data).digest()), dtype=torch.uint8))
    ]
    known: dict[bytes, Any] = {}
    for rank, digest in enumerate(digests):
        if digest not in known:
            known[digest] = json.loads(group.broadcast_bytes(data if group.rank == rank else None, rank))
    return [known[digest] for digest in digests]


def together(group: Group, work: Callable[[], Any]) -> list[Any]:
    """Do something on every worker; the results of all, or the error of the first that failed, on every worker."""
    return _agreed(group, *_attempt(work))


def patiently(group: Group, work: Callable[[], Any]) -> list[Any]:
    """The same for work that takes long and asks nothing of the group."""
    if group.size == 1:
        return together(group, work)
    done = threading.Event()
    outcome: list[tuple[Any, Exception | None]] = []

    def run() -> None:
        try:
            outcome.append(_attempt(work))
        finally:
            done.set()

    threading.Thread(target=run, name="argosy checkpoint files", daemon=True).start()
    seconds = min(_ROUND_SECONDS, getattr(group, "timeout_seconds", 4 * _ROUND_SECONDS) / 4)
    while True:
        done.wait(seconds)
        told = group.all_gather(torch.tensor([done.is_set()], dtype=torch.uint8))
        if all(int(each) for each in told):
            return _agreed(group, *(outcome[0] if outcome else (None, CheckpointError("the work was broken off"))))


def on_first(group: Group, work: Callable[[], Any]) -> Any:
    """Do something on rank 0; every worker gets its result, or raises its error."""
    return together(group, lambda: work() if group.rank == 0 else None)[0]


def _attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except CommError:  # the group itself is broken: there is nobody to agree with
        raise
    except Exception as error:  # whatever it is, the others must not wait for it
        return None, error


def _agreed(group: Group, result: Any, failure: Exception | None) -> list[Any]:
    if isinstance(failure, CheckpointError) and group.size == 1:
        raise failure
    told = gather(group, {"error": str(failure) or repr(failure)} if failure is not None else {"result": result})
    for rank, each in enumerate(told):
        if "error" in each:
            who = f"rank {rank}: " if group.size > 1 else ""
            raise CheckpointError(f"{who}{each['error']}") from failure
    return [each["result"] for each in told]
