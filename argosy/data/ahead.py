"""Batches, with a look at the one that comes next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

_END: Final = object()


def looking_ahead(batches: Iterable[Any], lookers: list[Callable[[Any, Any], None]]) -> Iterator[Any]:
    """The batches. Before one is handed out, lookers see the batch before it, and the one that comes after it.

    >>> seen = []
    >>> list(looking_ahead([1, 2, 3], [lambda last, coming: seen.append((last, coming))])), seen
    ([1, 2, 3], [(None, 2), (1, 3)])
    """
    if not lookers:  # nobody looks: no batch is loaded before its time
        yield from batches
        return
    coming, last = iter(batches), None
    batch = next(coming, _END)
    while batch is not _END:
        after = next(coming, _END)
        if after is not _END:
            for look in lookers:
                look(last, after)
        yield batch
        last, batch = batch, after
