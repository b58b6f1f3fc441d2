"""Which ids get a row: in a stream of ids most are seen once, and a row for each would be memory for nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

from argosy.config import ConfigError

_MOST = 2**24 - 1  # what the native table counts up to


@dataclass(frozen=True)
class Entry:
    """The admission of ids to a table. An id that is not admitted has its initial value, and its gradients are lost.

    >>> Entry.parsed("count:5")
    Entry(kind='count', count=5, probability=0.0)
    """

    kind: str = "always"
    count: int = 0
    probability: float = 0.0

    @staticmethod
    def parsed(text: str) -> Entry:
        """From "always", "count:5" (when an id is seen the fifth time) or "probability:0.1" (drawn at each push)."""
        kind, colon, number = text.partition(":")
        if kind == "always" and not colon:
            return Entry()
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if kind == "count" and value.is_integer() and 1 <= value <= _MOST:
            return Entry(kind, count=int(value))
        if kind == "probability" and 0 < value <= 1:
            return Entry(kind, probability=value)
        if kind == "count":
            raise ConfigError("entry", text, f"the count is a whole number from 1 to {_MOST}")
        if kind == "probability":
            raise ConfigError("entry", text, "the probability is above 0 and at most 1")
        raise ConfigError("entry", text, 'expected "always", "count:5" or "probability:0.1"')
