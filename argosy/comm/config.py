"""What a user may choose about communication."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from argosy.config import Config, ConfigError

AlgorithmName = Literal["auto", "direct", "ring", "halving_doubling", "binary_blocks", "tree", "hierarchical"]
MAX_SOCKETS: Final = 16


@dataclass(frozen=True)
class CommConfig(Config):
    """How collective operations run, and how long one may wait for its peers before it fails.

    `algorithm`: `auto` takes for each size the one that is cheapest on the links as they are measured at the start.
    `sockets`: how many between two ranks on different hosts carry collectives.
    """

    timeout_seconds: float = 300.0
    algorithm: AlgorithmName = "auto"
    sockets: int = 2

    def check(self) -> None:
        """Refuse a deadline that has passed before it starts, and sockets that do not help."""
        if self.timeout_seconds > 1e9:
            raise ConfigError("timeout_seconds", self.timeout_seconds, "nobody waits for decades: say 86400 for a day")
        if self.timeout_seconds <= 0:
            raise ConfigError("timeout_seconds", self.timeout_seconds, "a wait needs some time: say 300 for 5 minutes")
        if not 1 <= self.sockets <= MAX_SOCKETS:
            raise ConfigError("sockets", self.sockets, f"expected 1 to {MAX_SOCKETS}: 2 fill most networks")
