"""What a user may choose about communication."""

from __future__ import annotations

from dataclasses import dataclass

from argosy.config import Config, ConfigError


@dataclass(frozen=True)
class CommConfig(Config):
    """How long a collective operation may wait for its peers before it fails."""

    timeout_seconds: float = 300.0
    algorithm: str = "auto"
    sockets: int = 4

    def check(self) -> None:
        """Refuse a deadline that has passed before it starts."""
        if self.timeout_seconds > 1e9:
            raise ConfigError("timeout_seconds", self.timeout_seconds, "nobody waits for decades: say 86400 for a day")
        if self.timeout_seconds <= 0:
            raise ConfigError("timeout_seconds", self.timeout_seconds, "a wait needs some time: say 300 for 5 minutes")
