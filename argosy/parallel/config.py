"""What a user may choose about how gradients are reduced."""

from __future__ import annotations

from dataclasses import dataclass

from argosy.config import Config, ConfigError


@dataclass(frozen=True)
class ReducerConfig(Config):
    """How gradients become the whole job's.

    `bucket_mbytes`: how much of small gradients is gathered before it is reduced, while backward goes on.
    `sync_batchnorm`: batch-norm layers normalise by the statistics of the whole job's batch, not of the worker's.
    """

    bucket_mbytes: float = 4.0
    sync_batchnorm: bool = False

    def check(self) -> None:
        """Refuse buckets that hold nothing, or more than anybody sends at once."""
        if not 0 < self.bucket_mbytes <= 4096:
            raise ConfigError("bucket_mbytes", self.bucket_mbytes, "expected more than 0 and at most 4096, such as 4")
