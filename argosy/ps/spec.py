"""What makes a table: its name, the width of its rows, and how they begin, change and are let in."""

from __future__ import annotations

from dataclasses import dataclass, field

from argosy.ps.rules import Adagrad, RowRule, table_config


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
        self.config()

    def config(self) -> bytes:
        """The table as native code, here or on a server, takes it."""
        return table_config(self.dim, self.optimizer, self.initializer, self.entry, self.seed)

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied by in a step."""
        return self.optimizer.factor(step) if self.optimizer is not None else 1.0
