"""What all pipelines share: a model that is cut at its first batch, whose parts then belong to workers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from argosy.config import ConfigError
from argosy.parallel.pipeline.bubble import Action, Meter, theory
from argosy.parallel.pipeline.config import PipelineConfig
from argosy.parallel.pipeline.cutting import Cutting
from argosy.parallel.pipeline.evaluation import evaluate
from argosy.parallel.pipeline.links import Links
from argosy.parallel.pipeline.micro_batches import MicroBatch, cut, samples_of, without_samples
from argosy.parallel.pipeline.parts import Held, Parts, prune
from argosy.parallel.pipeline.stage_module import LossFunction, StageModule
from argosy.parallel.pipeline.ties import Ties

_TOLD_AFTER = 6  # steps that are measured before the bubble is told


class Staged(ABC):
    """A model whose layers are divided among workers, all of which see the same batches.

    It is cut when it sees the first batch, or by `build`. Until then every worker has the whole model (on the meta
    device, if it is too large); from then on, the model's `named_parameters()` are those that this worker holds.
    """

    def __init__(
        self,
        cutting: Cutting,
        config: PipelineConfig,
        stages: Mapping[int, tuple[int, ...]],
        links: Links,
        world: Links,
        show: Callable[[str], None],
        built: Callable[[Any], None] | None,
    ) -> None:
        """`stages` has the workers of each stage; `world` all workers of the job, whose first one decides."""
        self._cutting, self._config, self._workers = cutting, config, stages
        self._links, self._world, self._show, self._built = links, world, show, built
        self._meter, self._theory = Meter(), 0.0
        self._ties = Ties(links, {})
        self._optimizers: list[Optimizer] = []
        self._parts: Parts | None = None
        self._held = Held({}, [])
        self._sealed: set[str] = set()  # frozen parameters of stages that no gradient comes back to
        self._fresh = True  # the first step with new shapes warms up, and is not measured
        self.micro_batches = 0  # into how many parts a batch is cut; known when the model is cut
        self.stages = [stage for stage, workers in stages.items() if links.rank in workers]
        self.stage_modules: list[StageModule] = []

    @property
    def model(self) -> nn.Module:
        """The script's model."""
        return self._cutting.model

    @property
    def parts(self) -> Parts:
        """Where the model was cut, and which stages hold what."""
        if self._parts is None:
            raise RuntimeError("the model is not cut yet: the first step does it, or build(x) before it")
        return self._parts

    @property
    def workers(self) -> int:
        """How many workers this pipeline has; a job may have several side by side."""
        return self._links.size

    @property
    def is_built(self) -> bool:
        """Whether the model is cut."""
        return self._parts is not None

    @property
    def bubble(self) -> tuple[float | None, float]:
        """The idle part of the workers' time: as measured (None before there were two steps), and by theory."""
        return self._meter.measured, self._theory

    def names(self) -> set[str]:
        """The parameters and buffers that this worker holds, by their names in the whole model."""
        return self.parts.held_by(self.stages)

    def owned(self) -> set[str]:
        """Of what several workers hold, one is the owner: who writes it into a checkpoint, or adds it to a norm."""
        first = {stage for stage in self.stages if self._workers[stage][0] == self._links.rank}
        return {name for name in self.names() if self.parts.stages_of[name][0] in first}

    def attach(self, optimizer: Optimizer) -> None:
        """Take out of an optimizer what this worker does not hold: now, or as soon as the model is cut."""
        self._optimizers.append(optimizer)
        if self.is_built:
            prune(optimizer, list(self.model.parameters()), self._held.moved)

    def build(self, x: Any) -> None:
        """Cut the model for batches like this one. All workers of the job call it, or the first step does."""
        if self.is_built:
            return
        # Readers may have different batches, and all need the same number.
        count = int(self._world.tell(self._micro_batches_for(samples_of(x)), 0))
        part = cut(x, None, count)[0]
        self._cutting.check(part, len(self._workers))
        sizes = [len(self._workers[stage]) for stage in sorted(self._workers)]
        chosen = self._world.tell(self._cutting.choose(part, sizes) if self._world.rank == 0 else None, 0)
        self._parts, self._held = self._cutting.apply(
            chosen, part, self.stages, lambda tensor: self._world.broadcast(tensor, 0)
        )
        self.stage_modules = self._cutting.stages(self.parts, self.stages, part)
        self.micro_batches = count
        self._tell(chosen, part, samples_of(x))
        for optimizer in self._optimizers:
            prune(optimizer, list(self.model.parameters()), self._held.moved)
        if self._built is not None:
            self._built(self)
        self._check_sharded()
        here = dict(self.model.named_parameters())
        shared = self.parts.ties(self._workers.__getitem__, list(here))
        self._ties = Ties(self._links, {workers: [here[name] for name in names] for workers, names in shared.items()})
        self._sealed = self._frozen_where_nothing_comes_back(part)

    def step(self, x: Any, y: Any, loss_fn: LossFunction, scale: float = 1.0) -> Tensor:
        """Forward and backward of a batch; returns the mean loss over it, on all workers of the pipeline.

        Gradients of the mean loss times `scale` are added to those that this worker's parameters have. `x` goes into
        the model (a tuple or list as its arguments, a dict as its keywords).
        """
        self.build(x)
        self._check_thawed()
        batch = cut(x, y, self.micro_batches)
        for module in self.stage_modules:
            module.begin(batch, loss_fn, scale)
        run = self._prepared(batch)
        self._meter.busy_seconds = 0.0
        with self._ties.adding_up():
            begun = time.perf_counter()
            run()
            wall_seconds = time.perf_counter() - begun
        loss = sum(module.loss for module in self.stage_modules)
        told = torch.tensor([loss, self._meter.busy_seconds, wall_seconds], dtype=torch.float64)
        self._links.sum(told)
        self._stepped(float(told[1]), float(told[2]))
        return told[0].to(torch.get_default_dtype())

    def forward(self, x: Any) -> Any:
        """The model's output for a batch, on all workers of the pipeline; without gradients."""
        self.build(x)
        batch = cut(x, None, max(1, min(self.micro_batches, samples_of(x))))
        for module in self.stage_modules:
            module.begin(batch, None)
        begins = (None, *self.parts.cuts)
        output = evaluate(
            dict(zip(self.stages, self.stage_modules, strict=True)),
            batch,
            self._links,
            len(self._workers),
            owner=self._owner,
            metas=lambda stage, number: self._cutting.crossing(begins[stage], batch[number]),
            shapes=[self._cutting.seen(part).output for part in batch],
        )
        return output if samples_of(x) else without_samples(output)

    def close(self) -> None:
        """Let go of the model's gates. What this worker does not hold does not come back."""
        self._cutting.gate.close()

    @abstractmethod
    def _micro_batches_for(self, samples: int) -> int:
        """Into how many parts a batch of so many samples is cut."""

    @abstractmethod
    def _prepared(self, batch: Sequence[MicroBatch]) -> Callable[[], None]:
        """What runs forward and backward of micro-batches with these shapes."""

    def _owner(self, stage: int, micro_batch: int) -> int:
        """The worker that runs a stage on a micro-batch: a stage's workers take turns."""
        workers = self._workers[stage]
        return workers[micro_batch % len(workers)]

    def _play(self, programs: Mapping[int, Sequence[Action]], lengths: Mapping[int, float] | None = None) -> None:
        """Another schedule is used: its theory, and its first step is not measured."""
        self._theory, self._fresh = theory(programs, lengths), True

    def _stepped(self, busy_seconds: float, wall_seconds: float) -> None:
        if self._fresh:
            self._fresh = False
            return
        self._meter.stepped(busy_seconds, wall_seconds)
        if self._meter.steps == _TOLD_AFTER:
            self._show(
                f"pipeline: {self._meter.measured:.0%} of the workers' time is idle, {self._theory:.0%} by theory "
                f"(schedule={self._config.schedule}, {self.micro_batches} micro-batches)"
            )

    def _frozen_where_nothing_comes_back(self, part: MicroBatch) -> set[str]:
        ends = [(stage, self.parts.bounds(stage)[1]) for stage in self.stages]
        crossing = {stage: self._cutting.crossing(end, part) for stage, end in ends if end is not None}
        sealed = [stage for stage, metas in crossing.items() if not any(meta.requires_grad for meta in metas)]
        held = self.parts.held_by(sealed)
        return {name for name, each in self.model.named_parameters() if name in held and not each.requires_grad}

    def _check_thawed(self) -> None:
        """Refuse gradients that nobody would send: the other workers know nothing of what happens in this stage."""
        thawed = [name for name in sorted(self._sealed) if self.model.get_parameter(name).requires_grad]
        if thawed:
            raise RuntimeError(
                f"{thawed[0]} was thawed, of a stage that was frozen as a whole when the model was cut: no gradient "
                f"comes back to it; thaw it before the first step (a rate of 0 keeps it as it is until then), or save, "
                f"and go on in a new run"
            )

    def _check_sharded(self) -> None:
        """Refuse what sharding has left out: each worker would train a copy of its own."""
        if not any(isinstance(each, FSDPModule) for module in self.stage_modules for each in module.modules()):
            return
        if self._config.schedule == "zero-bubble":
            fix = (
                "it computes gradients of weights apart, where torch's fully_shard does not see them and they would be "
                "wrong; shard with schedule=interleaved or 1f1b"
            )
            raise ConfigError("schedule", self._config.schedule, fix)
        covered = {id(parameter) for module in self.stage_modules for _, parameter in module.named_parameters()}
        # A tied parameter that two stages of this worker have is sharded twice, and then has a second name.
        named = self.model.named_parameters()
        missing = [name for name, each in named if id(each) not in covered or name not in self.parts.stages_of]
        if missing:
            fix = (
                f"with several stages on a worker, parameters are sharded by layers, and {', '.join(missing[:4])} "
                f"belong to no layer or to two of them; put them into a module of their own, or use schedule=1f1b"
            )
            raise ConfigError("schedule", self._config.schedule, fix)

    def _tell(self, chosen: dict[str, Any], part: MicroBatch, samples: int) -> None:
        """Show how the model was cut. A worker is told by its number in the pipeline."""
        rule = "as told" if self._config.micro_batches is not None else "4 for each worker, if there are samples"
        self._show(
            f"pipeline of {len(self._workers)} stages on {self._links.size} workers, "
            f"schedule={self._config.schedule}, {self.micro_batches} micro-batches ({rule}) of {samples} samples"
        )
        where = {
            stage: f"worker{'s' if len(workers) > 1 else ''} {', '.join(map(str, workers))}"
            for stage, workers in self._workers.items()
        }
        for line in self._cutting.table(chosen, self.parts, part, where):
            self._show(line)
        if self._held.unset:
            self._show(f"  {len(self._held.unset)} tensors have no numbers yet: load a checkpoint, or initialise them")
