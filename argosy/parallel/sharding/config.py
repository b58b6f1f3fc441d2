"""What a user may choose about sharding, besides how many workers shard and what: that is the mesh's."""

from __future__ import annotations

import re
from dataclasses import dataclass

from argosy.config import Config, ConfigError


@dataclass(frozen=True)
class ShardConfig(Config):
    """`shard_modules`: which modules are sharded as a whole, gathered when they run: `auto` chooses by size.

    Patterns of names say otherwise: `shard_modules=blocks.*,head`. `offload`: optimizer states stay in the memory of
    the host, and not of the GPU. `recompute`: which blocks compute their activations again in backward instead of
    keeping them: `none`, `every:k` (each k-th block) or `auto` (as many as it takes to fit).
    """

    shard_modules: str = "auto"
    offload: bool = False
    recompute: str = "none"

    def check(self) -> None:
        """Refuse what cannot be read."""
        if not all(pattern.strip() for pattern in self.shard_modules.split(",")):
            fix = "expected auto, or patterns of module names separated by commas, such as blocks.*,head"
            raise ConfigError("shard_modules", self.shard_modules, fix)
        if self.recompute not in ("none", "auto") and not re.fullmatch(r"every:[1-9][0-9]{0,5}", self.recompute):
            raise ConfigError("recompute", self.recompute, "expected none, auto, or every:k such as every:2")

    @property
    def patterns(self) -> list[str]:
        """The patterns that the user gave; none for `auto`."""
        return [] if self.shard_modules == "auto" else [each.strip() for each in self.shard_modules.split(",")]

    @property
    def every(self) -> int | None:
        """Of how many blocks one is recomputed, if that was said."""
        return int(self.recompute.partition(":")[2]) if self.recompute.startswith("every:") else None
