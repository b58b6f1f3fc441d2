"""Everything that a user may choose about how replicas of a model are trained, and which choices go together."""

from __future__ import annotations

from dataclasses import dataclass

from argosy.compress.config import CompressConfig
from argosy.config import ConfigError
from argosy.optim.config import OptimConfig
from argosy.parallel.config import ReducerConfig
from argosy.parallel.local_config import LocalConfig
from argosy.parallel.pipeline.config import PipelineConfig
from argosy.parallel.sharding.config import ShardConfig
from argosy.parallel.tensor.config import TensorConfig


@dataclass(frozen=True)
class TrainingConfig(
    ReducerConfig, CompressConfig, OptimConfig, LocalConfig, ShardConfig, TensorConfig, PipelineConfig
):
    """How models are trained: how gradients are reduced, compressed, sharded; precision, averages, plans, schedules."""

    def check(self) -> None:
        """Refuse what cannot work together."""
        if self.sync != "step":
            reasons = {
                "compress": (self.compress != "none", "compresses gradients; for 4-bit differences say diloco:k:int4"),
                "precision": (
                    self.precision == "fp16",
                    "decides by gradients that all share whether a step is skipped",
                ),
                "average": (self.average != "none", "follows parameters that are the same on all workers"),
                "sync_batchnorm": (self.sync_batchnorm, "meets in every step"),
            }
            for name, (chosen, reason) in reasons.items():
                if chosen:
                    value = getattr(self, name)
                    fix = f"replicas train alone under sync={self.sync}, and {name} {reason}; leave one of the two out"
                    raise ConfigError(name, value, fix)
        if self.compress.partition(":")[0] == "dgc" and self.precision == "fp16":
            raise ConfigError(
                "compress",
                self.compress,
                "DGC keeps momentum from step to step, and precision=fp16 scales gradients differently in each; "
                "use precision=bf16",
            )
