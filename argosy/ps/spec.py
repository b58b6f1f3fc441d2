"""What makes a table: its name, the width of its rows, and how they begin, change and are let in."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Final

from argosy.config import ConfigError
from argosy.ps.rules import Adagrad, RowRule, table_config

_TEXTS: Final = ("name", "initializer", "entry")


@dataclass(frozen=True)
class TableSpec:
    """A table, as all workers and servers must agree on it. Wrong values are refused when it is made.

    >>> TableSpec("words", dim=16).dim
    16
    """

    name: str
    dim: int
    optimizer: RowRule | None = field(default_factory=lambda: Adagrad(lr=0.05))  # none: what is pushed is added
    initializer: str = "uniform:0.01"
    entry: str = "always"
    seed: int = 0

    def __post_init__(self) -> None:
        for names, kind, wanted in ((("dim", "seed"), Integral, "a whole number"), (_TEXTS, str, "text")):
            for name in names:
                value = getattr(self, name)
                if not isinstance(value, kind) or isinstance(value, bool):
                    told = f", not the text {value!r}" if isinstance(value, str) else ""
                    raise ConfigError(name, value, f"expected {wanted}{told}")
        if self.optimizer is not None and not isinstance(self.optimizer, RowRule):
            fix = "a table has an optimizer of its own, which steps its rows: one of argosy.ps, such as"
            raise ConfigError("optimizer", self.optimizer, f"{fix} argosy.ps.Adagrad(lr=0.05)")
        self.config()

    def config(self) -> bytes:
        """The table as native code, here or on a server, takes it."""
        return table_config(self.dim, self.optimizer, self.initializer, self.entry, self.seed)

    def lines(self) -> list[str]:
        """The table in words, a line for each field: to find where two differ."""
        return [f"table {self.name!r}: {each.name}={getattr(self, each.name)}" for each in fields(self)[1:]]

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied by in a step."""
        return self.optimizer.factor(step) if self.optimizer is not None else 1.0
