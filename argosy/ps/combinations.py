"""Which choices go with a parameter server. What is not known to work is refused, with the reason.

Under `ps=` the servers hold what the other ways to train divide or average among workers, so most of their options
have nothing to act on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from argosy.config import ConfigError
from argosy.parallel.combinations import HybridConfig
from argosy.parallel.mesh_config import MeshConfig, Sizes
from argosy.ps.config import PsConfig


@dataclass(frozen=True)
class ServedConfig(PsConfig, HybridConfig):
    """Everything about how a job trains, with servers or without."""

    def check_workers(self, workers: int, servers: int = 0) -> None:
        """Refuse what does not fit the workers and servers of a job, or does not go with the rest."""
        super().check_workers(workers)
        if self.ps == "none":
            if servers:
                fix = (
                    f"nothing would use the {servers} of --servers; say --strategy ps=async or another (servers do not "
                    f"run the script, so that it cannot be said there), or leave --servers out"
                )
                raise ConfigError("ps", self.ps, fix)
            return
        if workers > 1 and not servers:
            fix = f"{workers} workers meet at servers: start some with `argosy run --servers 1`, or use one worker"
            raise ConfigError("ps", self.ps, fix)
        if self.aggregate is not None and self.aggregate > workers:
            fix = f"a step cannot wait for more gradients than there are workers: 1 to {workers}"
            raise ConfigError("aggregate", self.aggregate, fix)
        for name, reason in self._refused_with_servers(self.part(MeshConfig).sizes(workers)):
            raise ConfigError(name, getattr(self, name), f"{reason} (ps={self.ps})")

    def _refused_with_servers(self, sizes: Sizes) -> Iterator[tuple[str, str]]:
        for name in ("shard", "tensor", "pipeline"):
            if getattr(sizes, name) > 1:
                said = "shard_stage" if name == "shard" and self.shard is None else name
                yield said, "each worker computes whole models, whose parameters servers hold; leave it out"
        if self.compress != "none":
            yield "compress", "it is for gradients between workers; to servers ps_values=fp16 or int8 is sent"
        if self.sync != "step":
            yield "sync", "workers meet at servers, and ps= says how often; for local steps use ps=geo:50"
        if self.average != "none":
            yield "average", "it follows parameters that are the same on all workers; leave it out"
        if self.precision == "fp16":
            yield "precision", "it skips steps by gradients that all share; use precision=bf16"
        if self.sync_batchnorm:
            yield "sync_batchnorm", "it meets in every step; leave it out"
        if self.accumulate > 1:
            yield (
                "accumulate",
                "gradients go to servers batch by batch; use a larger batch_size instead",
            )
        if self.balance:
            yield "balance", "in asynchronous modes faster workers take more by themselves; leave it out"
        if self.lr_scale != "none" or self.warmup != "none":
            said = "lr_scale" if self.lr_scale != "none" else "warmup"
            yield said, "a server's optimizer has its own learning rate and schedule; set them there"
        if self.dense == "server":
            yield from self._said(("bucket_mbytes",), "gradients go to servers, not into buckets; leave it out")
        elif self.aggregate is not None:
            yield "aggregate", "dense=allreduce waits for all workers in each step; leave one of the two out"
        if self.has_leases:
            yield from self._refused_with_leases()

    def _refused_with_leases(self) -> Iterator[tuple[str, str]]:
        if self.batch == "global":
            yield "batch", "each worker's batch is a step of its own, as large as the script's; leave it out"
        if self.ramp != "none":
            yield "ramp", "each worker's batch is a step of its own, and no global batch grows; leave it out"
