"""Which choices go together across the axes of the mesh. What is not known to work is refused, with the reason.

The table in docs/large.md says which combinations are tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from argosy.config import ConfigError
from argosy.data.batches import BatchConfig
from argosy.parallel.mesh_config import MeshConfig, Sizes
from argosy.parallel.pipeline.config import PipelineConfig
from argosy.parallel.tensor.config import TensorConfig
from argosy.parallel.training_config import TrainingConfig


@dataclass(frozen=True)
class HybridConfig(TrainingConfig, BatchConfig, MeshConfig):
    """Everything about how a job trains."""

    def check(self) -> None:
        """Refuse what cannot work on any number of workers."""
        if self.accumulate > 1 and self.sync != "step":
            fix = f"sync={self.sync} has no gradients to reduce less often; leave one of the two out"
            raise ConfigError("accumulate", self.accumulate, fix)

    def check_workers(self, workers: int) -> None:
        """Refuse a mesh that does not fit the workers, or does not go with the rest."""
        sizes = self.part(MeshConfig).sizes(workers)
        for name, reason in self._refused(sizes):
            raise ConfigError(name, getattr(self, name), reason)
        if sizes.turns:
            self.part(PipelineConfig).check_turns(sizes.turns)
        elif sizes.pipeline > 1:
            self.part(PipelineConfig).check_workers(sizes.pipeline)

    def _refused(self, sizes: Sizes) -> Iterator[tuple[str, str]]:
        """Fields that cannot be what they are, and why."""
        whole = self.stage < 2 and sizes.tensor == 1 and sizes.pipeline == 1
        yield from self._unused(sizes, whole)
        if not whole and self.sync != "step":
            yield "sync", "replicas that train alone hold whole models; use data= alone, or no sync"
        if self.recompute == "auto" and self.sync_batchnorm:
            yield (
                "recompute",
                "each worker goes by its own memory, and a block that is computed again gathers statistics again, with "
                "all workers; use every:1 or every:2",
            )
        if self.stage == 1 and sizes.shard > 1:
            yield from self._refused_with_states(sizes)
        if not whole:
            yield from self._refused_in_parts(sizes)

    def _refused_with_states(self, sizes: Sizes) -> Iterator[tuple[str, str]]:
        if sizes.tensor > 1 or sizes.pipeline > 1:
            yield (
                "shard_stage",
                "states alone are sharded for whole models; with tensor= or pipeline= use shard_stage=2",
            )
        if self.compress.startswith("dgc"):
            yield "compress", "DGC keeps the momentum itself, and SGD without it has no states to shard"
        if self.sync != "step":
            yield "sync", "workers that train alone step alone, and sharded states step together"

    def _refused_in_parts(self, sizes: Sizes) -> Iterator[tuple[str, str]]:
        """What does not go with models that no worker holds whole."""
        if self.compress == "bf16" and sizes.workers > 1 and (sizes.turns or sizes.data * sizes.shard == 1):
            yield "compress", "it is for gradients that travel along data= and shard=, and here none do; leave it out"
        elif self.compress not in ("none", "bf16"):
            yield (
                "compress",
                "codecs but bf16 act between workers that hold whole models (data=, shard_stage=1): what they hold "
                "back of a gradient belongs to all of it; use bf16, or leave it out",
            )
        if self.precision == "fp16":
            yield "precision", "the scale of the loss goes by whole gradients, and here are parts; use precision=bf16"
        if self.sync_batchnorm:
            yield "sync_batchnorm", "statistics are gathered between workers that hold whole models; leave it out"
        if self.balance and sizes.data * sizes.shard != sizes.workers:
            yield "balance", "shares go by each worker's speed, and here several workers compute one share together"
        elif self.balance:
            yield (
                "balance",
                "shares go by each worker's own time, and where parameters are gathered layer by layer workers wait "
                "for each other all along, so all take equally long; use shard_stage=1, or leave it out",
            )
        if self.recompute == "auto" and sizes.tensor > 1 and sizes.pipeline == 1:
            yield (
                "recompute",
                "each worker goes by its own memory, and workers that divide a block compute it again together; use "
                "every:1 or every:2",
            )
        if sizes.pipeline > 1:
            yield from self._refused_in_stages(sizes)

    def _refused_in_stages(self, sizes: Sizes) -> Iterator[tuple[str, str]]:
        """What does not go with pipelines."""
        if self.average != "none":
            yield (
                "average",
                "a pipeline's workers hold different layers, and the average is of whole models; leave it out",
            )
        if self.recompute == "auto":
            yield (
                "recompute",
                "it goes by what all blocks of a model keep, and no worker has all; use every:1 or every:2",
            )
        if self.schedule == "zero-bubble" and sizes.data * sizes.shard > 1:
            yield (
                "schedule",
                f"it computes gradients of weights apart, where torch's fully_shard does not see them, and here "
                f"{sizes.data * sizes.shard} replicas of each stage need it; use schedule=interleaved or 1f1b",
            )
        if sizes.turns and self.accumulate > 1:
            yield "accumulate", "stages of different sizes take whole batches; use more micro_batches"

    def _unused(self, sizes: Sizes, whole: bool) -> Iterator[tuple[str, str]]:
        """Fields that say something about what is not there."""
        if self.stage < 2:
            yield from self._said(("shard_modules",), "it is for shard_stage=2 and 3")
        if self.stage == 0:
            yield from self._said(("offload",), "it moves sharded optimizer states; say shard_stage=")
        if sizes.tensor == 1:
            yield from self._said(_names(TensorConfig), "it is for tensor=2 or more")
        if sizes.pipeline == 1:
            yield from self._said(_names(PipelineConfig), "it is for pipeline=2 or more")
        if sizes.pipeline > 1:
            yield from self._said(("shard_modules",), "stages are sharded by the size of their modules; leave it out")
        if not whole or self.sync != "step":
            yield from self._said(("bucket_mbytes",), "gradients are not gathered in buckets here; leave it out")

    def _said(self, names: tuple[str, ...], reason: str) -> Iterator[tuple[str, str]]:
        defaults = {field.name: field.default for field in fields(self)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                yield name, reason


def _names(kind: type[TensorConfig | PipelineConfig]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))
