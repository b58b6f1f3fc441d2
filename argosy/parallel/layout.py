"""How a model is laid out over the mesh: what is done to it, in order, when workers do not each hold the whole.

Layers are divided along the tensor axis; around that, each block is recomputed; then modules are sharded along the
shard axis and replicated along the data axis. A model in stages is cut before: its plan for the tensor axis is that of
the whole model, and each worker divides the layers that it then holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from argosy.comm.engine import EngineGroup
from argosy.comm.group import Group
from argosy.config import ConfigError
from argosy.parallel.blocks import size_bytes
from argosy.parallel.materialise import is_meta, materialise
from argosy.parallel.memory import give_freed_memory_back, is_plenty, keep_from_the_second_step
from argosy.parallel.mesh import Mesh
from argosy.parallel.pipeline.config import PipelineConfig
from argosy.parallel.pipeline.pipeline import Pipeline
from argosy.parallel.pipeline.staged import Staged
from argosy.parallel.pipeline.uneven import UnevenPipeline
from argosy.parallel.recompute import Recompute, RecomputedForward
from argosy.parallel.replicas import make_alike
from argosy.parallel.sharding.choose import choose, told
from argosy.parallel.sharding.config import ShardConfig
from argosy.parallel.sharding.fully import shard_modules
from argosy.parallel.sharding.states import ShardedStates
from argosy.parallel.sharding.swap import Replaced
from argosy.parallel.tensor.apply import TensorParallel
from argosy.parallel.tensor.config import TensorConfig
from argosy.parallel.tensor.place import fsdp_placement
from argosy.parallel.tensor.plan import Plan, make_plan
from argosy.parallel.training_config import TrainingConfig


class Layout:
    """Lays models out. `stage` is what is sharded; `show` takes lines for the user."""

    def __init__(
        self,
        mesh: Mesh,
        stage: int,
        config: TrainingConfig,
        group: Group,
        show: Callable[[str], None],
        leaving: ExitStack,
    ) -> None:
        self._mesh, self._config, self._group = mesh, config.part(ShardConfig), group
        self._tensor_config = config.part(TensorConfig)
        self._wire = torch.bfloat16 if config.compress == "bf16" else None  # no other codec goes with models in parts
        self._tensor_parallel: list[TensorParallel] = []
        self._stage = stage if mesh.sizes.shard > 1 else 0  # a job of one worker has nobody to shard with
        self._show, self._leaving = show, leaving
        self._config_of_pipeline = config.part(PipelineConfig)
        self._replaced = Replaced()
        self._optimizers: list[Optimizer] = []
        self._first_steps: set[Optimizer] = set()  # of those that have made none
        self._divided_bytes = 0  # of all parameters, frozen ones too
        self._torch: dict[str, DeviceMesh] = {}

    @property
    def divides(self) -> bool:
        """Whether workers hold parts of parameters."""
        return self._stage >= 2 or self._mesh.sizes.tensor > 1

    def recompute(self, model: nn.Module) -> None:
        """Let blocks be recomputed, if that was asked for. Layers have been divided before, and nothing else."""
        if self._config.recompute != "none":
            here = self._mesh.hosts.count(self._mesh.hosts[self._group.rank])
            recompute = Recompute(model, self._config.every, here, self._show)
            self._leaving.callback(recompute.close)

    @property
    def stages(self) -> bool:
        """Whether models are cut into stages."""
        return self._mesh.sizes.pipeline > 1

    def cut(self, model: nn.Module) -> Staged:
        """A pipeline for a model; it is cut, and its stages are sharded, when the first batch is there."""
        config = self._config_of_pipeline
        if self._mesh.sizes.turns:
            group, turns = cast(EngineGroup, self._group), self._mesh.sizes.turns
            staged: Staged = UnevenPipeline(model, group, turns, config, self._show, order=self._mesh.order)
        else:
            axis = self.on_torch(device_of(model))["pipeline"]
            plan = self._plan(model) if self._mesh.sizes.tensor > 1 else None
            staged = Pipeline(model, axis, config, self._show, built=lambda cut: self._lay_out_stages(cut, plan))
        self._leaving.callback(staged.close)
        return staged

    def replicas(self, model: nn.Module) -> list[DeviceMesh]:
        """The axes that readers stand along."""
        axes = [axis for axis in ("data", "shard") if getattr(self._mesh.sizes, axis) > 1]
        return [self.on_torch(device_of(model))[axis] for axis in axes]

    def follow(self, optimizer: Optimizer) -> None:
        """Give an optimizer the parameters that models have now, and those that they get when they are cut."""
        self._replaced.swap(optimizer)
        self._optimizers.append(optimizer)
        here = self._mesh.hosts.count(self._mesh.hosts[self._group.rank])
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        trained_bytes = sum(p.numel() * p.element_size() for p in parameters)
        if self._stage and is_plenty(here * max(self._divided_bytes, trained_bytes)):
            self._leaving.callback(keep_from_the_second_step(optimizer, self._first_steps))

    def _lay_out_stages(self, pipeline: Pipeline, plan: Plan | None) -> None:
        with self._replaced.watching(pipeline.model):
            root = self.on_torch(device_of(pipeline.model))
            if plan is not None:
                with recomputed_outside(pipeline.model):
                    parallel = self._divide_layers(plan, root)
                for module in pipeline.stage_modules:
                    module.divided = parallel
            if self._mesh.readers > 1:
                for module in pipeline.stage_modules:
                    self._shard(module, root)
        for optimizer in self._optimizers:
            self._replaced.swap(optimizer)

    def divide(self, model: nn.Module) -> None:
        """Give each worker its parts of a model, which all workers have, or which is on the meta device."""
        device = device_of(model)
        self._divided_bytes += size_bytes(model)
        if not is_meta(model):
            make_alike(model, self._group)
        root = self.on_torch(device)
        with self._replaced.watching(model):
            if self._mesh.sizes.tensor > 1:
                self._tensor_parallel.append(self._divide_layers(self._plan(model), root))
            self.recompute(model)
            if self._mesh.readers > 1:
                plain = not (is_meta(model) or self._mesh.sizes.tensor > 1)
                self._shard(model, root, {p for p in model.parameters() if plain and not p.dim()})
            if is_meta(model):
                materialise(model, device, self._group)
        if self._stage >= 2:
            give_freed_memory_back()

    def divide_states(self, optimizer: Optimizer) -> ShardedStates:
        """Let each worker of the shard axis keep its part of an optimizer's states."""
        devices = {parameter.device.type for group in optimizer.param_groups for parameter in group["params"]}
        device = "cpu" if self._config.offload else next(iter(devices), "cpu")
        if self._config.offload:
            self._refuse_offload(devices)
        return ShardedStates(optimizer, self.on_torch(device)["shard"], offload=self._config.offload)

    def on_torch(self, device: str) -> DeviceMesh:
        """torch's mesh of the same workers, for tensors on a device."""
        if device not in self._torch:
            self._torch[device] = self._mesh.on_torch(device, always=("shard",))
        return self._torch[device]

    @contextmanager
    def whole_step(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Around a forward pass and its loss, which may stay divided; what it yields makes the loss whole."""
        with ExitStack() as stack:
            for parallel in self._tensor_parallel:
                stack.enter_context(parallel.whole_step())
            yield self._tensor_parallel[0].whole if self._tensor_parallel else lambda loss: loss

    def _plan(self, model: nn.Module) -> Plan:
        plan = make_plan(model, self._mesh.sizes.tensor, self._tensor_config)
        for line in plan.lines():
            self._show(line)
        return plan

    def _divide_layers(self, plan: Plan, root: DeviceMesh) -> TensorParallel:
        parallel = TensorParallel(plan.model, root["tensor"], plan, self._tensor_config)
        self._leaving.callback(parallel.close)
        return parallel

    def _shard(self, model: nn.Module, root: DeviceMesh, whole: set[nn.Parameter] | None = None) -> None:
        chosen = choose(model, self._config)
        axes = root["data", "shard"] if self._mesh.sizes.data > 1 else root["shard"]
        if self._config.offload:
            self._refuse_offload({device_of(model)})
        if self._mesh.sizes.shard > 1:
            self._show(f"sharded over {self._mesh.sizes.shard} workers, stage {self._stage}: {told(model, chosen)}")
        placed = fsdp_placement if self._mesh.sizes.tensor > 1 else None
        gathered, offload = self._stage < 3, self._config.offload
        shard_modules(
            chosen, axes, keep_gathered=gathered, offload=offload, placed=placed, whole=whole, wire=self._wire
        )

    def _refuse_offload(self, devices: set[str]) -> None:
        if devices == {"cpu"}:
            fix = "the model is in the host's memory, and its optimizer's states are too; leave it out"
            raise ConfigError("offload", True, fix)


@contextmanager
def recomputed_outside(model: nn.Module) -> Iterator[None]:
    """Around what replaces forwards of modules that are recomputed already: what is computed again is the new one."""
    forwards = {module: module.__dict__.get("forward") for module in model.modules()}
    recomputed = {module: each for module, each in forwards.items() if isinstance(each, RecomputedForward)}
    for module, recomputing in recomputed.items():
        module.forward = recomputing.forward
    yield
    for module, recomputing in recomputed.items():
        recomputing.forward, module.forward = module.forward, recomputing


def device_of(model: nn.Module) -> str:
    """The kind of device that a model computes on."""
    kinds = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    return next(iter(kinds), "cpu")
