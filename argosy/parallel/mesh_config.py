"""What a user may choose about the mesh: how many workers stand along each axis of parallelism."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

from argosy.config import Config, ConfigError


@dataclass(frozen=True)
class Sizes:
    """The workers along each axis. `turns` has the workers of each stage if stages differ in it, and is empty else."""

    pipeline: int = 1
    data: int = 1
    shard: int = 1
    tensor: int = 1
    turns: tuple[int, ...] = ()

    @property
    def workers(self) -> int:
        """All of them."""
        return sum(self.turns) if self.turns else math.prod((self.pipeline, self.data, self.shard, self.tensor))

    def __str__(self) -> str:
        if self.turns:
            return f"pipeline=[{','.join(map(str, self.turns))}]"
        axes = {axis: getattr(self, axis) for axis in ("pipeline", "data", "shard", "tensor")}
        return " x ".join(f"{size} {axis}" for axis, size in axes.items() if size > 1) or "1 data"


@dataclass(frozen=True)
class MeshConfig(Config):
    """Workers per axis. Of `data` and `shard`, one that is left out takes the workers that remain.

    `data`: replicas, each with its share of the samples. `shard`: workers that divide the samples too, and besides what
    `shard_stage` says: 1 the optimizer's states, 2 also the gradients, 3 also the parameters. `tensor`: workers that
    divide each layer. `pipeline`: workers that divide the layers; `pipeline=[3,1]` has three for the first stage, which
    take turns, and one for the second.

    >>> str(MeshConfig(tensor=2).sizes(workers=8))
    '4 data x 2 tensor'
    >>> str(MeshConfig(tensor=2, shard_stage=3).sizes(workers=8))
    '4 shard x 2 tensor'
    """

    data: int | None = None
    shard: int | None = None
    shard_stage: int | None = None
    tensor: int = 1
    pipeline: int | tuple[int, ...] = 1

    def check(self) -> None:
        """Refuse sizes that no job could have."""
        for name in ("data", "shard"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                fix = "an axis has at least 1 worker; leave it out to use all workers"
                raise ConfigError(name, getattr(self, name), fix)
        if self.tensor < 1:
            raise ConfigError("tensor", self.tensor, "an axis has at least 1 worker; leave it out to divide no layer")
        if min(self.workers_by_stage) < 1:
            raise ConfigError("pipeline", self.pipeline, "an axis, and each stage, has at least 1 worker")
        if isinstance(self.pipeline, tuple):
            self._check_turns()
        if self.shard_stage is not None and self.shard_stage not in (1, 2, 3):
            fix = "expected 1 (optimizer states), 2 (and gradients) or 3 (and parameters)"
            raise ConfigError("shard_stage", self.shard_stage, fix)
        if self.shard_stage is not None and self.shard == 1:
            fix = f"shard_stage={self.shard_stage} needs workers to shard over; leave shard out to use all workers"
            raise ConfigError("shard", self.shard, fix)

    @property
    def workers_by_stage(self) -> tuple[int, ...]:
        """The workers of each stage where these differ; else how many stages there are."""
        return self.pipeline if isinstance(self.pipeline, tuple) else (self.pipeline,)

    @property
    def stage(self) -> int:
        """What is sharded: 0 nothing, 1 states, 2 and gradients, 3 and parameters. An axis alone means all of it."""
        if self.shard_stage is not None:
            return self.shard_stage
        return 3 if self.shard is not None and self.shard > 1 else 0

    def sizes(self, workers: int) -> Sizes:
        """The mesh of a job of `workers`; an error if it does not fit them."""
        if isinstance(self.pipeline, tuple):
            if sum(self.pipeline) != workers:
                self._refuse("pipeline", self.pipeline, sum(self.pipeline), workers)
            return Sizes(pipeline=len(self.pipeline), turns=self.pipeline)
        fixed = {"pipeline": self.pipeline, "tensor": self.tensor}
        fixed |= {name: size for name in ("data", "shard") if (size := getattr(self, name)) is not None}
        if self.shard_stage is None:
            fixed.setdefault("shard", 1)
        elif "shard" not in fixed:
            fixed.setdefault("data", 1)
        known = math.prod(fixed.values())
        open_axis = next((name for name in ("data", "shard") if name not in fixed), None)
        if workers % known or (open_axis is None and known != workers):
            said = [name for name in ("data", "shard", "tensor", "pipeline") if name in fixed]
            name = max(said, key=lambda name: fixed[name] > 1)  # the first that asks for several; else the first
            self._refuse(name, fixed[name], known, workers, multiple=open_axis is not None)
        if self.shard_stage is not None and open_axis == "shard" and known == workers > 1:
            fix = f"the other axes leave no workers to shard over; leave it out, or start {2 * known} workers"
            raise ConfigError("shard_stage", self.shard_stage, fix)
        sizes = fixed | ({open_axis: workers // known} if open_axis else {})
        return Sizes(sizes["pipeline"], sizes["data"], sizes["shard"], sizes["tensor"])

    def _check_turns(self) -> None:
        if len(self.workers_by_stage) < 2:
            equal = f"for equal stages say pipeline={self.workers_by_stage[0]}"
            fix = f"a list has the workers of each stage, as [3,1]; {equal}"
            raise ConfigError("pipeline", self.pipeline, fix)
        for name, value in (("data", self.data), ("shard", self.shard), ("tensor", self.tensor)):
            if value not in (None, 1):
                fix = "stages of different sizes have replicas of their own, and no other axis; leave it out"
                raise ConfigError(name, value, fix)
        if self.shard_stage is not None:
            raise ConfigError(
                "shard_stage", self.shard_stage, "stages of different sizes are not sharded; leave it out"
            )

    def _refuse(self, name: str, value: object, need: int, workers: int, multiple: bool = False) -> NoReturn:
        needed = f"a multiple of {need}" if multiple else str(need)
        alone = f"say {name}={workers}, " if name in ("data", "shard") and value == need and not multiple else ""
        raise ConfigError(
            name,
            value,
            f"the mesh needs {needed} workers and the job has {workers}; {alone}"
            f"leave {name} out, or start {need} workers",
        )
