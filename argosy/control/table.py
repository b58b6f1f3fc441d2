"""The coordinator's keys and values, and who waits for which key.

Plain data and no input or output: the operations are those of torch's `TCPStore`, byte for byte, because torch's own
rendezvous relies on them. It lives in the coordinator's event loop, so each operation is atomic by being a plain
function.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Final

KEY_OVERHEAD_BYTES: Final = 200
"""What Python's bookkeeping of one key costs, roughly; counted, so that many tiny keys are bounded too."""

_INTEGER: Final = re.compile(rb"-?[0-9]{1,19}")
_INT64: Final = range(-(2**63), 2**63)


class TableError(Exception):
    """An operation that the table refuses; it changed nothing. `kind` is what the client sees."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Watch:
    """One waiting request: settled once each of its keys has been there, even if it was deleted again.

    [Note: keys seen once] Counting down, instead of asking for all keys at the same moment, is what `TCPStore` does:
    a key that is set and deleted at once still releases those who waited for it.
    """

    def __init__(self, missing: set[str]) -> None:
        self.missing = missing
        self.size_bytes = sum(cost_bytes(key, b"") for key in missing)
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not missing:
            self.settled.set_result(None)


class Table:
    """Keys to values, bounded in number and bytes.

    >>> table = Table(max_keys=10, max_bytes=10_000)
    >>> table.add("workers", 2), table.add("workers", 3), table.get("workers")
    (2, 5, b'5')
    >>> table.compare_set("leader", b"", b"rank 1"), table.compare_set("leader", b"", b"rank 2")
    (b'rank 1', b'rank 1')
    """

    def __init__(self, max_keys: int, max_bytes: int) -> None:
        self._max_keys = max_keys
        self._max_bytes = max_bytes
        self._values: dict[str, bytes] = {}
        self._used_bytes = 0
        # Room kept for wills, see `reserve`.
        self._reserved_keys = 0
        self._watches: dict[str, set[Watch]] = {}
        self._watched_bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    @property
    def used_bytes(self) -> int:
        """What counts against the limit now."""
        return self._used_bytes

    def get(self, key: str) -> bytes | None:
        """Return the value, or None."""
        return self._values.get(key)

    def set(self, key: str, value: bytes) -> None:
        """Set a key and release those who waited for it."""
        old = self._values.get(key)
        if old is None:
            self._occupy(cost_bytes(key, value), keys=1)
        else:
            self._occupy(len(value) - len(old), keys=0)
        self._values[key] = value
        for watch in self._watches.pop(key, ()):
            watch.missing.discard(key)
            if not watch.missing and not watch.settled.done():
                watch.settled.set_result(None)

    def add(self, key: str, amount: int) -> int:
        """Add to an integer kept as decimal text, 0 if the key is new; return the sum."""
        old = self._values.get(key, b"0")
        if not _INTEGER.fullmatch(old):
            raise TableError("not-integer", f"key {key!r} does not hold an integer, so nothing can be added to it")
        total = int(old) + amount
        if total not in _INT64:
            raise TableError("not-integer", f"key {key!r} would leave the range of 64-bit integers")
        self.set(key, b"%d" % total)
        return total

    def append(self, key: str, value: bytes) -> None:
        """Append to a value, empty if the key is new."""
        self.set(key, self._values.get(key, b"") + value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set `desired` if the value is `expected` (empty: if the key is new); return what then is the value.

        For a key that is missing where one was expected, that is `expected`, as `TCPStore` has it.
        """
        current = self._values.get(key)
        if current is None and expected:
            return expected
        if current is not None and current != expected:
            return current
        self.set(key, desired)
        return desired

    def delete(self, key: str) -> bool:
        """Remove a key; tell whether it was there."""
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._used_bytes -= cost_bytes(key, value)
        return True

    def reserve(self, key: str, value: bytes) -> None:
        """Keep room for a key, so that setting it after `release` cannot fail."""
        self._occupy(cost_bytes(key, value), keys=1)
        self._reserved_keys += 1

    def release(self, key: str, value: bytes) -> None:
        """Give up the room that `reserve` kept."""
        self._used_bytes -= cost_bytes(key, value)
        self._reserved_keys -= 1

    def watch(self, keys: Iterable[str]) -> Watch:
        """Start to wait for keys; always paired with `unwatch`."""
        watch = Watch({key for key in keys if key not in self._values})
        # Counted apart from what is stored: a full table must not keep anybody from waiting.
        if self._watched_bytes + watch.size_bytes > self._max_bytes:
            raise TableError("full", f"the keys that are waited for take {self._watched_bytes} bytes already")
        self._watched_bytes += watch.size_bytes
        for key in watch.missing:
            self._watches.setdefault(key, set()).add(watch)
        return watch

    def unwatch(self, watch: Watch) -> None:
        """Forget a wait, settled or not."""
        self._watched_bytes -= watch.size_bytes
        for key in watch.missing:
            watches = self._watches.get(key)
            if watches is not None:
                watches.discard(watch)
                if not watches:
                    del self._watches[key]

    def _occupy(self, more_bytes: int, keys: int) -> None:
        used_keys = len(self._values) + self._reserved_keys + keys
        if keys and used_keys > self._max_keys:
            raise TableError("full", f"the coordinator holds {self._max_keys} keys, its limit: delete some")
        if more_bytes > 0 and self._used_bytes + more_bytes > self._max_bytes:
            raise TableError(
                "full",
                f"the coordinator holds {self._used_bytes} bytes and may hold {self._max_bytes}: "
                f"{more_bytes} more do not fit; delete keys or keep large data elsewhere",
            )
        self._used_bytes += more_bytes


def cost_bytes(key: str, value: bytes) -> int:
    """Return what a key and its value count against the limit."""
    return len(key.encode("utf-8")) + len(value) + KEY_OVERHEAD_BYTES
