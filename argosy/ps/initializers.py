"""What the row of an id begins as: a pure function of (seed, id, column), so that it needs no row to be known."""

from __future__ import annotations

import math
from dataclasses import dataclass

from argosy.config import ConfigError


@dataclass(frozen=True)
class Initial:
    """The initial values of a table's rows.

    >>> Initial.parsed("uniform:0.01")
    Initial(kind='uniform', low_or_mean=-0.01, high_or_std=0.01)
    """

    kind: str = "zeros"
    low_or_mean: float = 0.0
    high_or_std: float = 0.0

    @staticmethod
    def parsed(text: str) -> Initial:
        """From "zeros", "constant:0.1", "uniform:0.01" (from -0.01 to 0.01) or "normal:0.01" (a deviation of 0.01)."""
        kind, colon, number = text.partition(":")
        if kind == "zeros" and not colon:
            return Initial()
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if kind not in ("constant", "uniform", "normal") or not math.isfinite(value):
            raise ConfigError("initializer", text, 'expected "zeros", "constant:0.1", "uniform:0.01" or "normal:0.01"')
        if kind == "constant":
            return Initial(kind, value)
        if value < 0:
            raise ConfigError("initializer", text, f"the width of a {kind} distribution is 0 or more")
        return Initial(kind, -value if kind == "uniform" else 0.0, value)
