"""A pipeline of equal stages along an axis of the mesh, on torch's schedules."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from argosy.parallel.pipeline.bubble import Meter, theory
from argosy.parallel.pipeline.config import PipelineConfig
from argosy.parallel.pipeline.cutting import Cutting
from argosy.parallel.pipeline.evaluation import evaluate
from argosy.parallel.pipeline.ghost import signature
from argosy.parallel.pipeline.links import TorchLinks
from argosy.parallel.pipeline.micro_batches import MicroBatch, cut, samples_of
from argosy.parallel.pipeline.parts import Held, Parts, prune
from argosy.parallel.pipeline.stage_module import LossFunction, StageModule
from argosy.parallel.pipeline.ties import Ties
from argosy.parallel.pipeline.torch_stage import TorchSchedule, TorchStage, stages_of

_SCHEDULES_KEPT = 4  # each has buffers for all that it receives
_TOLD_AFTER = 6  # steps that are measured before the bubble is told


class Pipeline:
    """A model whose layers are divided among the workers of an axis; each of them sees the same batches.

    It is cut when it sees the first batch, or by `build`. Until then every worker has the whole model (on the meta
    device, if it is too large); from then on, the model's `named_parameters()` are those that this worker holds.
    `world` is the group of all workers of the job, whose first one decides where to cut; `built` is called when it is
    cut and before anything runs: the time to shard `stage_modules` over other axes.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        config: PipelineConfig,
        show: Callable[[str], None],
        *,
        world: dist.ProcessGroup | None = None,
        built: Callable[[Pipeline], None] | None = None,
    ) -> None:
        group = mesh.get_group()
        self._links, self._group = TorchLinks(group), group
        self._world = TorchLinks(world if world is not None else dist.group.WORLD)  # type: ignore[arg-type]
        config.check_workers(self._links.size)
        self._config, self._show, self._built = config, show, built
        self._stage_count = config.stages(self._links.size)
        self.stages = self._stages_of(self._links.rank)
        self._cutting = Cutting(model, config.cuts())
        self._optimizers: list[Optimizer] = []
        self._schedules: OrderedDict[Hashable, TorchSchedule] = OrderedDict()
        self._meter = Meter()
        self._theory: float | None = None
        self._parts: Parts | None = None
        self._held = Held({}, [])
        self._ties = Ties(self._links, {})
        self._fresh = True  # a schedule's first step warms up, and is not measured
        self._count = 0
        self.stage_modules: list[StageModule] = []

    @property
    def model(self) -> nn.Module:
        """The script's model."""
        return self._cutting.model

    @property
    def is_built(self) -> bool:
        """Whether the model is cut."""
        return self._parts is not None

    @property
    def micro_batches(self) -> int:
        """Into how many parts a batch is cut; 0 before the first."""
        return self._count

    @property
    def bubble(self) -> tuple[float | None, float | None]:
        """The idle part of the workers' time: as measured, and by theory. None before there was a step."""
        return self._meter.measured, self._theory

    def names(self) -> set[str]:
        """The parameters and buffers that this worker holds, by their names in the whole model."""
        assert self._parts is not None, "the model is cut at the first step; build(x) cuts it before"
        return self._parts.held_by(self.stages)

    def owned(self) -> set[str]:
        """Of what several workers hold, each has one owner: who writes it into a checkpoint, or adds it to a norm."""
        assert self._parts is not None
        return {name for name in self.names() if self._parts.stages_of[name][0] in self.stages}

    def attach(self, optimizer: Optimizer) -> None:
        """Take out of an optimizer what this worker does not hold: now, or as soon as the model is cut."""
        self._optimizers.append(optimizer)
        if self.is_built:
            self._prune(optimizer)

    def build(self, x: Any) -> None:
        """Cut the model for batches like this one. All workers of the job call it, or the first step does."""
        if self.is_built:
            return
        workers = self._links.size
        count = self._config.micro_batches_for(workers, samples_of(x))
        count = int(self._world.tell(count, 0))  # readers may have different batches, and all need the same number
        part = cut(x, None, count)[0]
        self._cutting.check(part, self._stage_count)
        first = self._world.rank == 0
        chosen = self._world.tell(self._cutting.choose(part, [1] * self._stage_count) if first else None, 0)
        self._parts, self._held = self._cutting.apply(
            chosen, part, self.stages, lambda tensor: self._world.broadcast(tensor, 0)
        )
        self.stage_modules = [
            self._cutting.stage(self._parts, stage, part, alone=len(self.stages) == 1) for stage in self.stages
        ]
        self._count = count
        self._tell(chosen, part, samples_of(x))
        for optimizer in self._optimizers:
            self._prune(optimizer)
        if self._built is not None:
            self._built(self)
        here = {name: tensor for name, tensor in self.model.named_parameters() if tensor.requires_grad}
        tied = self._parts.ties(lambda stage: (self._owner(stage),), list(here))
        self._ties = Ties(self._links, {workers: [here[name] for name in names] for workers, names in tied.items()})

    def step(self, x: Any, y: Any, loss_fn: LossFunction, scale: float = 1.0) -> Tensor:
        """Forward and backward of a batch; returns the mean loss over it, on all workers of the pipeline.

        Gradients of the mean loss times `scale` are added to those that this worker's parameters have. `x` goes into
        the model (a tuple or list as its arguments, a dict as its keywords).
        """
        self.build(x)
        batch = cut(x, y, self._count)
        schedule = self._schedule(batch)
        for module in self.stage_modules:
            module.begin(batch, loss_fn, scale)
        self._meter.busy_seconds = 0.0
        with self._ties.adding_up():
            begun = time.perf_counter()
            schedule.run()
            wall_seconds = time.perf_counter() - begun
        loss = sum(module.loss for module in self.stage_modules)
        told = torch.tensor([loss, self._meter.busy_seconds, wall_seconds], dtype=torch.float64)
        self._links.sum(told)
        self._stepped(float(told[1]), float(told[2]))
        return told[0].to(torch.get_default_dtype())

    def forward(self, x: Any) -> Any:
        """The model's output for a batch, on all workers of the pipeline; without gradients."""
        self.build(x)
        assert self._parts is not None
        batch = cut(x, None, max(1, min(self._count, samples_of(x))))
        for module in self.stage_modules:
            module.begin(batch, None)
        begins = (None, *self._parts.cuts)
        return evaluate(
            dict(zip(self.stages, self.stage_modules, strict=True)),
            batch,
            self._links,
            self._stage_count,
            owner=lambda stage, number: self._owner(stage),
            metas=lambda stage, number: self._cutting.crossing(begins[stage], batch[number]),
            shapes=[self._cutting.seen(part).output for part in batch],
        )

    def close(self) -> None:
        """Let go of the model's gates. What this worker does not hold does not come back."""
        self._cutting.gate.close()

    def _schedule(self, batch: Sequence[MicroBatch]) -> TorchSchedule:
        assert self._parts is not None
        key = tuple(signature((part.args, part.kwargs)) for part in batch)
        if key in self._schedules:
            self._schedules.move_to_end(key)
            return self._schedules[key]
        stages = []
        for number, module in zip(self.stages, self.stage_modules, strict=True):
            received, sent = (
                [self._cutting.crossing(end, part) for part in batch] for end in self._parts.bounds(number)
            )
            stages.append(TorchStage(module, number, self._stage_count, self._group, received, sent, self._meter))
        self._schedules[key] = made = TorchSchedule(self._config.schedule, stages, len(batch))
        self._theory = theory(made.programs()) if self._theory is None else self._theory
        while len(self._schedules) > _SCHEDULES_KEPT:
            self._schedules.popitem(last=False)
        self._fresh = True
        return self._schedules[key]

    def _stages_of(self, worker: int) -> list[int]:
        return stages_of(self._config.schedule, worker, self._links.size, self._stage_count)

    def _owner(self, stage: int) -> int:
        return next(worker for worker in range(self._links.size) if stage in self._stages_of(worker))

    def _prune(self, optimizer: Optimizer) -> None:
        prune(optimizer, list(self.model.parameters()), self._held.moved)

    def _stepped(self, busy_seconds: float, wall_seconds: float) -> None:
        if self._fresh:
            self._fresh = False
            return
        self._meter.stepped(busy_seconds, wall_seconds)
        if self._meter.steps == _TOLD_AFTER:
            assert self._theory is not None
            self._show(
                f"pipeline: {self._meter.measured:.0%} of the workers' time is idle, {self._theory:.0%} by theory "
                f"(schedule={self._config.schedule}, {self._count} micro-batches)"
            )

    def _tell(self, chosen: dict[str, Any], part: MicroBatch, samples: int) -> None:
        assert self._parts is not None
        rule = (
            "as told" if self._config.micro_batches is not None else "4 for each worker, if there are samples for them"
        )
        self._show(
            f"pipeline of {self._stage_count} stages on {self._links.size} workers, schedule={self._config.schedule}, "
            f"{self._count} micro-batches ({rule}) of {samples} samples"
        )
        where = {stage: f"worker {self._owner(stage)}" for stage in range(self._stage_count)}
        for line in self._cutting.table(chosen, self._parts, part, where):
            self._show(line)
        if self._held.unset:
            self._show(f"  {len(self._held.unset)} tensors have no numbers yet: load a checkpoint, or initialise them")
