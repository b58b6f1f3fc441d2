"""The board of a group that joins: a key for each phase and rank in the store, all of it bounded and with a deadline.

A value is a small JSON object, its length checked before it is parsed. A rank that fails says why under the keys of the
phases it will not reach, so that the others, who wait for these keys, do not wait until their deadline.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

from torch.distributed.distributed_c10d import Store

from argosy.comm.sockets import JoinError

MAX_CARD_BYTES: Final = 4096
PHASES: Final = ("card", "reached", "listen", "done")
_MAX_REASON: Final = 500  # characters, of up to 6 bytes in JSON


class Board:
    """The group's keys in the store: `PHASE/RANK`, read with a deadline."""

    def __init__(self, store: Store, rank: int, size: int, deadline_seconds: float) -> None:
        self.rank, self.size = rank, size
        self.deadline = time.monotonic() + deadline_seconds
        self._store, self._seconds = store, deadline_seconds
        self._published: list[str] = []

    def publish(self, phase: str, value: dict[str, Any]) -> None:
        """Tell the others this rank's value of a phase."""
        encoded = json.dumps(value)  # ASCII
        assert len(encoded) <= MAX_CARD_BYTES
        self._store.set(f"{phase}/{self.rank}", encoded)
        self._published.append(phase)

    @contextlib.contextmanager
    def failures_told(self) -> Iterator[None]:
        """Tell a failure inside the block under the keys that the others wait for."""
        try:
            yield
        except BaseException as error:
            reason = str(error)[:_MAX_REASON] or type(error).__name__
            with contextlib.suppress(Exception):  # the store may be what failed
                for phase in PHASES:
                    if phase not in self._published:
                        self.publish(phase, {"error": reason})
            raise

    def read(self, phase: str, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """The values of some ranks, waited for."""
        keys = [f"{phase}/{rank}" for rank in ranks]
        if not keys:
            return []
        remaining = max(self.deadline - time.monotonic(), 0.001)
        try:
            self._store.wait(keys, timedelta(seconds=remaining))
        except RuntimeError as error:
            absent = self._absent(phase, ranks, error)
            self._values(phase, [rank for rank in ranks if rank not in absent])  # one of them may have said why
            if absent:
                raise self._late(absent) from error
        return self._values(phase, ranks)

    def _absent(self, phase: str, ranks: Sequence[int], error: RuntimeError) -> list[int]:
        """The ranks that a wait has ended without; if it is the store that has failed, say so."""
        try:
            return [rank for rank in ranks if not self._store.check([f"{phase}/{rank}"])]
        except RuntimeError:
            raise JoinError(f"the store that rank {self.rank} joins through has failed: {error}") from error

    def watch(self, ranks: list[int]) -> None:
        """Raise if one of these ranks has failed; called while there is something else to wait for."""
        for rank in ranks:
            if self._store.check([f"done/{rank}"]):
                self._values("done", [rank])

    def clear(self) -> None:
        """Remove all keys; a store that cannot is left as it is."""
        for phase in PHASES:
            for rank in range(self.size):
                try:
                    self._store.delete_key(f"{phase}/{rank}")
                except (RuntimeError, NotImplementedError):
                    return

    def _values(self, phase: str, ranks: Sequence[int]) -> list[dict[str, Any]]:
        keys = [f"{phase}/{rank}" for rank in ranks]
        extended = bool(keys) and self._store.has_extended_api()  # type: ignore[attr-defined]
        raw = self._store.multi_get(keys) if extended else [self._store.get(key) for key in keys]
        values = []
        for rank, value in zip(ranks, raw, strict=True):
            try:
                values.append(parse(value))
            except ValueError as error:
                raise JoinError(f"rank {rank} has published a {phase} that cannot be read: {error}") from None
            if isinstance(reason := values[-1].get("error"), str):
                raise JoinError(f"rank {rank} could not join: {reason[:_MAX_REASON]}", echo=True)
        return values

    def _late(self, ranks: list[int]) -> JoinError:
        named = ", ".join(str(rank) for rank in ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        who = f"rank {named} has" if len(ranks) == 1 else f"ranks {named} have"
        return JoinError(f"{who} not joined within {self._seconds:g} s; look into the logs of these workers", echo=True)


def parse(value: bytes) -> dict[str, Any]:
    """A JSON object of bounded length; anything else raises `ValueError`."""
    if len(value) > MAX_CARD_BYTES:
        raise ValueError(f"it has {len(value)} bytes, more than {MAX_CARD_BYTES}")
    try:
        parsed = json.loads(value)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(parsed, dict):
        raise ValueError("it is no JSON object")
    return parsed
