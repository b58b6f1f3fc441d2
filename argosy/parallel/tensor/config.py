"""What a user may choose about tensor parallelism."""

from __future__ import annotations

import re
from dataclasses import dataclass

from argosy.config import Config, ConfigError

_STYLE = re.compile(r"column([2-9]?)|row|vocab|heads|replicate")
STYLES = "column, column2 or column3 (each half or third by itself), row, vocab, heads or replicate"


@dataclass(frozen=True)
class TensorConfig(Config):
    """How layers are divided along the tensor axis.

    `tensor_plan`: `auto`, or styles for modules by the patterns of their names
    (`h.*.mlp.fc:column,lm_head:replicate`); the first pattern that fits counts, and what none fits is inferred.
    `sequence_parallel`: between blocks, where layer norms and dropouts act, activations are divided along their
    second dimension.

    >>> TensorConfig(tensor_plan="*.fc1:column,*.fc2:row").entries()
    (('*.fc1', 'column'), ('*.fc2', 'row'))
    """

    tensor_plan: str = "auto"
    sequence_parallel: bool = False

    def check(self) -> None:
        """Refuse a plan that cannot be read."""
        self.entries()

    def entries(self) -> tuple[tuple[str, str], ...]:
        """The patterns and their styles, in order; none for `auto`."""
        if self.tensor_plan == "auto":
            return ()
        entries = []
        for entry in self.tensor_plan.split(","):
            pattern, colon, style = (part.strip() for part in entry.partition(":"))
            if not colon or not pattern or not _STYLE.fullmatch(style):
                fix = f"{entry.strip()!r} is no pattern:style, with a style of {STYLES}; or say auto"
                raise ConfigError("tensor_plan", self.tensor_plan, fix)
            entries.append((pattern, style))
        return tuple(entries)
