"""What a user may choose about a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from argosy.config import Config, ConfigError

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]


@dataclass(frozen=True)
class PipelineConfig(Config):
    """How a model is cut into stages, and in which order micro-batches go through them.

    `schedule`: `gpipe` (all forward, then all backward), `1f1b` (backward as soon as it can be: less memory),
    `interleaved` (two or more stages on each worker: less idle time), `zero-bubble` (two stages on each worker, and the
    gradients of weights fill the idle time). `micro_batches`: into how many parts a batch is cut; by default 4 for each
    worker of the pipeline, fewer if the batch has not as many samples. `split`: `auto` times the layers, or the names
    of the modules that begin a new stage, such as `blocks.2,blocks.4`.

    >>> PipelineConfig(split="blocks.2,blocks.4").split_names()
    ['blocks.2', 'blocks.4']
    """

    schedule: Schedule = "1f1b"
    micro_batches: int | None = None
    split: str = "auto"

    def check(self) -> None:
        """Refuse what no pipeline could do."""
        if self.micro_batches is not None and self.micro_batches < 1:
            raise ConfigError(
                "micro_batches", self.micro_batches, "a batch is cut into at least 1; leave it out for 4 x workers"
            )
        if self.split != "auto" and not all(self.split_names()):
            raise ConfigError("split", self.split, "expected auto, or names of modules such as blocks.2,blocks.4")
        if len(set(self.split_names())) < len(self.split_names()):
            raise ConfigError("split", self.split, "a module is named twice; each begins one stage")

    def split_names(self) -> list[str]:
        """The modules that begin a stage, as named; none if they are to be found."""
        return [] if self.split == "auto" else [name.strip() for name in self.split.split(",")]

    def check_workers(self, workers: int) -> object:
        """Refuse numbers that do not fit a pipeline of so many workers."""
        if self.split_names():
            self._check_stage_count(len(self.split_names()) + 1, workers)
        count = self.micro_batches
        if count is None:
            return None
        if self.schedule != "gpipe" and count < workers:
            fix = (
                f"schedule={self.schedule} keeps {workers} workers busy with at least {workers}; or use schedule=gpipe"
            )
            raise ConfigError("micro_batches", count, fix)
        if self.schedule == "interleaved" and count % (count // workers):
            below = count // workers * workers
            fix = f"schedule=interleaved goes in rounds of the {workers} workers; say {below} or {below + workers}"
            raise ConfigError("micro_batches", count, fix)
        return None

    def check_turns(self, counts: Sequence[int]) -> None:
        """Refuse what does not fit stages of so many workers each, which take micro-batches in turn."""
        spelled = f"pipeline=[{','.join(map(str, counts))}]"
        if self.schedule != "1f1b":
            fix = f"stages of different sizes, {spelled}, have an order of their own, akin to 1f1b; leave it out"
            raise ConfigError("schedule", self.schedule, fix)
        if self.split_names() and len(self.split_names()) + 1 != len(counts):
            fix = f"{spelled} has {len(counts)} stages, so {len(counts) - 1} modules begin a new one"
            raise ConfigError("split", self.split, fix)
        if self.micro_batches is not None and self.micro_batches < max(counts):
            fix = f"a stage has {max(counts)} workers that take turns; say {max(counts)} or more"
            raise ConfigError("micro_batches", self.micro_batches, fix)

    def stages_per_worker(self) -> int:
        """How many stages a worker has, if the cuts are to be found."""
        return 2 if self.schedule in ("interleaved", "zero-bubble") else 1

    def stage_count(self, workers: int) -> int:
        """How many stages the model is cut into."""
        return len(self.split_names()) + 1 if self.split_names() else workers * self.stages_per_worker()

    def micro_batches_for(self, workers: int, samples: int) -> int:
        """How many micro-batches a batch is cut into: as told, or 4 for each worker if there are samples for them."""
        if self.micro_batches is not None:
            return self.micro_batches
        return workers * max(1, min(4, samples // workers))

    def _check_stage_count(self, stages: int, workers: int) -> None:
        if self.schedule == "interleaved":
            if stages % workers or stages < 2 * workers:
                fix = (
                    f"schedule=interleaved has 2 or more stages on each of {workers} workers, and this makes {stages}; "
                )
                raise ConfigError("split", self.split, fix + f"name {2 * workers - 1} modules for {2 * workers} stages")
        elif stages != workers * self.stages_per_worker():
            wanted = workers * self.stages_per_worker()
            fix = f"schedule={self.schedule} on {workers} workers has {wanted} stages, and this makes {stages}; "
            raise ConfigError("split", self.split, fix + f"name {wanted - 1} module{'s' if wanted > 2 else ''}")
