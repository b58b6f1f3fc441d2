"""What a strategy adds to the script's models and optimizers: replicas that are kept one, codecs, precision, averages.

The facade hands over each object that the script distributes; here the parts that its strategy asks for are made and
attached, in the order in which they must act on a step. What they remember goes into checkpoints.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from argosy.comm.engine import EngineGroup
from argosy.comm.group import Group, SoloGroup
from argosy.compress.catalogue import can_take, make_codec
from argosy.compress.codec import Codec, extent
from argosy.compress.config import CompressConfig
from argosy.compress.takeover import return_momenta
from argosy.data.cursor import Cursor
from argosy.data.leased import LeasedLoader
from argosy.data.loader import Loader
from argosy.optim.average import Average
from argosy.optim.config import OptimConfig
from argosy.optim.fused import Fused
from argosy.optim.precision import Precision
from argosy.optim.schedule import LearningRate
from argosy.parallel.clip import clip_by_global_norm
from argosy.parallel.config import ReducerConfig
from argosy.parallel.data import DataParallel
from argosy.parallel.divided import Divided, times
from argosy.parallel.layout import Layout
from argosy.parallel.local import LocalReplicas, Round
from argosy.parallel.local_config import LocalConfig
from argosy.parallel.mesh import Mesh
from argosy.parallel.passes import SharedPasses
from argosy.parallel.staged import StagedModel
from argosy.parallel.training_config import TrainingConfig

Tell = Callable[..., None]
LossFunction = Callable[[Any, Any], Tensor]


class Training:
    """The models and optimizers of one job.

    `stage` is what is sharded along the mesh's shard axis. `tell(kind, **fields)` takes events, `show` a line for the
    user.
    """

    def __init__(
        self,
        config: TrainingConfig,
        mesh: Mesh,
        stage: int,
        group: Group,
        cursor: Cursor,
        accumulate: int,
        tell: Tell,
        show: Callable[[str], None],
    ) -> None:
        self._config, self._group, self._cursor, self._accumulate = config, group, cursor, accumulate
        self._tell, self._show = tell, show
        self._precision = Precision(config.part(OptimConfig))
        self._models: dict[str, nn.Module] = {}
        self._parallel: list[DataParallel] = []
        self._local: list[LocalReplicas] = []
        self._codecs: list[Codec] = []
        self._optimizers: list[Optimizer] = []
        self._averages: list[Average] = []
        self._rates: list[LearningRate] = []
        self._loaders: list[Loader | LeasedLoader] = []
        self._quiet = False
        self._passes = SharedPasses(group)
        self._leaving = ExitStack()
        self._mesh, self._stage = mesh, stage
        self._layout = Layout(mesh, stage, config, group, show, self._leaving)
        self._divided: list[Divided] = []
        self._staged: dict[nn.Module, StagedModel] = {}

    def close(self) -> None:
        """Leave models and optimizers to the script again."""
        self._leaving.close()

    def add_loader(self, loader: Loader | LeasedLoader) -> None:
        """Steps come from this loader, or from another: rules that count samples or epochs go by it."""
        self._loaders.append(loader)

    def add_model(self, model: nn.Module, number: int) -> None:
        """Keep a model's replicas one, in the way that was chosen. `number` tells it from the job's other models."""
        name = f"model{len(self._models)}"
        self._models[name] = model
        if autocast := self._precision.attach(model):
            self._leaving.callback(autocast.close)
        if not self._layout.divides or self._layout.stages:
            self._layout.recompute(model)
        local = self._config.part(LocalConfig)
        if self._layout.stages:
            axes = self._layout.replicas(model)
            self._staged[model] = StagedModel(
                self._layout.cut(model), self._group, self._cursor, number, self._mesh.readers, axes
            )
        elif self._layout.divides:
            self._layout.divide(model)
            divided = Divided(model, self._group, self._cursor, number, self._mesh.readers, self._passes)
            self._leaving.callback(divided.close)
            self._divided.append(divided)
        elif local.rounds().kind != "step":
            replicas = LocalReplicas(model, self._group, self._cursor, local, number, self._told_round)
            self._leaving.callback(replicas.close)
            self._local.append(replicas)
        else:
            codec = make_codec(self._config.part(CompressConfig)) if self._group.size > 1 else None
            self._codecs += [codec] if codec is not None else []
            reducer = self._config.part(ReducerConfig)
            parallel = DataParallel(
                model, self._group, self._cursor, number, reducer, codec, self._accumulate, self._passes
            )
            self._leaving.callback(parallel.close)
            self._parallel.append(parallel)
            if codec is not None and (line := extent(codec, dict(model.named_parameters()))):
                self._show(f"compress={self._config.compress}: {line}")

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Let what acts on an optimizer's steps act on this one's. Its models have been added before."""
        self._optimizers.append(optimizer)
        if guard := self._precision.guard(optimizer):
            self._leaving.callback(guard.remove)
        self._layout.follow(optimizer)
        self._attach_stages(optimizer)
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        trained = [model for model in self._models.values() if any(id(p) in held for p in model.parameters())]
        parallels = [parallel for parallel in self._parallel if parallel.model in trained]
        for parallel in parallels:  # before states are divided: parts are taken of gradients that are all there
            parallel.attach(optimizer)
        if self._stage == 1 and self._mesh.sizes.shard > 1:
            self._leaving.callback(self._layout.divide_states(optimizer).close)
        for replicas in self._local:
            replicas.attach(optimizer)
        for parallel in parallels:
            if parallel.codec is not None:
                parallel.codec.attach(dict(parallel.model.named_parameters()), optimizer)
        if self._group.size == 1 and trained and (unused := make_codec(self._config.part(CompressConfig))):
            unused.check(optimizer)  # what several workers would refuse, one does too
        self._add_rate(optimizer)
        decay = self._config.decay()
        if decay is not None:
            if not trained:
                raise RuntimeError(
                    f"average={self._config.average} follows the models that an optimizer trains, and none of its "
                    f"parameters is in a distributed model: distribute the model with the optimizer, or before it"
                )
            for model in trained:
                average = Average(model, decay).attach(optimizer)
                self._leaving.callback(average.close)
                self._averages.append(average)
        self._leaving.callback(Fused(optimizer).close)

    def _attach_stages(self, optimizer: Optimizer) -> None:
        """Let an optimizer have what this worker holds of the model in stages that it trains."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        trained = [each for model, each in self._staged.items() if any(id(p) in held for p in model.parameters())]
        if len(trained) > 1:
            raise RuntimeError(
                "an optimizer trains several models that are cut into stages (pipeline=): give each one its own"
            )
        for staged in trained:
            staged.pipeline.attach(optimizer)

    def _add_rate(self, optimizer: Optimizer) -> None:
        """Which of several loaders is for training shows when the optimizer steps in the loop over it."""
        config = self._config.part(OptimConfig)
        if len(self._loaders) > 1:
            rate = LearningRate(config, later=self._choose_loader)
        else:
            rate = LearningRate(config, *(_lengths(self._loaders[0]) if self._loaders else ()))
        rate.attach(optimizer, (lambda: self._cursor.closes) if self._layout.stages else None)
        self._leaving.callback(rate.close)
        self._rates.append(rate)
        self._tell_rate(rate)

    def _choose_loader(self, rate: LearningRate) -> None:
        chosen = next((loader for loader in self._loaders if loader is self._cursor.loader), self._loaders[0])
        rate.go_by(*_lengths(chosen))
        self._tell_rate(rate)

    def _tell_rate(self, rate: LearningRate) -> None:
        if line := rate.line():
            self._tell("learning_rate", arithmetic=line)
            self._show(line)

    @property
    def bytes_sent(self) -> int:
        """What codecs and rounds of this worker have handed over so far."""
        return sum(codec.bytes_sent for codec in self._codecs) + sum(each.bytes_sent for each in self._local)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block reduce nothing."""
        if self._accumulate > 1:
            raise RuntimeError(
                f"fleet.no_sync() and accumulate={self._accumulate} both say which batches make up a step; with "
                f"accumulate= the loader does, and needs no block: leave out one of the two"
            )
        before, self._quiet = self._quiet, True
        try:
            with ExitStack() as stack:
                for parallel in (*self._parallel, *self._divided):
                    stack.enter_context(parallel.no_sync())
                yield
        finally:
            self._quiet = before

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Models hold their averaged parameters in this block."""
        if not self._averages:
            raise RuntimeError("no average is kept: ask for one with average=ema:0.999, and distribute the optimizer")
        with ExitStack() as stack:
            for average in self._averages:
                stack.enter_context(average.applied())
            yield

    def step(
        self, model: nn.Module, optimizer: Optimizer, x: Any, y: Any, loss_fn: LossFunction, clip_norm: float | None
    ) -> Tensor:
        """One whole step; returns the mean loss over the job. Batches that are accumulated have none but the last."""
        if self._quiet:
            raise RuntimeError(
                "fleet.step is a whole step, and fleet.no_sync() is for backward passes that are part of one: write "
                "those out with loss.backward(), or say accumulate=k"
            )
        self._cursor.mean_loss = None
        staged = self._staged.get(model)
        with self._precision.whole_step():
            optimizer.zero_grad()
            loss = staged.backward(x, y, loss_fn) if staged is not None else self._backward(model, x, y, loss_fn)
            if self._cursor.loss is not None:  # the pass has reached tables alone, with which no loss travels
                (self._cursor.have_own_loss if self._cursor.closes else self._cursor.keep_loss)()
            mean_loss = self._cursor.mean_loss
            # Not by the gradients at hand: a worker whose stage is frozen has none, and the norm is asked of all.
            if clip_norm is not None and self._cursor.closes and self._precision.unscale_(optimizer):
                self._clip(optimizer, staged, clip_norm)
            before = self._precision.factor
            if not self._precision.step(optimizer):
                self._tell("overflow", scale=self._precision.factor)
            self._rescale_codecs(self._precision.factor / before)
        return loss.detach() if mean_loss is None else loss.detach().new_tensor(mean_loss)

    def forward(self, model: nn.Module, x: Any) -> Any:
        """The model's output for this worker's samples, without gradients. All workers call it: replicas become one."""
        self.synchronise()
        staged = self._staged.get(model)
        with torch.no_grad():
            return called(model, x) if staged is None else staged.pipeline.forward(x)

    def _backward(self, model: nn.Module, x: Any, y: Any, loss_fn: LossFunction) -> Tensor:
        with ExitStack() as stack:
            for divided in self._divided:
                stack.enter_context(divided.weighted_by_loss())
            whole = stack.enter_context(self._layout.whole_step())
            loss = whole(loss_fn(called(model, x), y))
        self._cursor.loss = float(loss.detach())
        weight = next((divided.weight for divided in self._divided), 1.0)
        self._precision.backward(loss if weight == 1 else times(loss, weight))
        return loss

    def _clip(self, optimizer: Optimizer, staged: StagedModel | None, most: float) -> None:
        if staged is not None:
            staged.clip(most)
            return
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        group = SoloGroup() if self._local else self._group  # replicas that train alone have gradients of their own
        clip_by_global_norm(parameters, most, group, holders=group.size)

    def synchronise(self) -> None:
        """Make replicas one, if they train alone for a while. All workers call it."""
        for replicas in self._local:
            replicas.synchronise()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of all this; empty if nothing was chosen. All workers call it and get the same."""
        group = cast(EngineGroup, self._group)
        self._rescale_codecs(1 / self._precision.factor)  # whoever loads it may have another scale, or none
        try:
            codecs = [{"name": self._config.compress, "kept": codec.state_dict(group)} for codec in self._codecs]
        finally:
            self._rescale_codecs(self._precision.factor)
        states = {
            "precision": self._precision.state_dict(),
            "local": [replicas.state_dict(group) for replicas in self._local],
            "codecs": codecs,
            "averages": [average.state_dict() for average in self._averages],
            "rates": [rate.state_dict() for rate in self._rates if rate.active],
        }
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint. What it has of parts that are not in use now is left alone."""
        group = cast(EngineGroup, self._group)
        self._precision.load_state_dict(state.get("precision", {}))
        for replicas, kept in itertools.zip_longest(self._local, state.get("local", [])):
            if replicas is not None:  # parameters were loaded in place: rounds start from them in any case
                replicas.load_state_dict(kept, group) if kept is not None else replicas.restart(group)
        self._load_codecs(state.get("codecs", []), group)
        self._rescale_codecs(self._precision.factor)
        for average, kept in itertools.zip_longest(self._averages, state.get("averages", [])):
            if average is not None:
                average.load_state_dict(kept) if kept is not None else average.restart()
        active = [rate for rate in self._rates if rate.active]
        for rate, kept in zip(active, state.get("rates", []), strict=False):
            rate.load_state_dict(kept)

    def forget(self, models: Sequence[nn.Module]) -> None:
        """Keep nothing of what belongs to parameters that these models had; all workers call it."""
        for parallel in self._parallel:
            if parallel.codec is not None and parallel.model in models:
                parallel.codec.load_state_dict({}, cast(EngineGroup, self._group))
        for replicas in self._local:
            if replicas.model in models:
                replicas.restart(self._group)
        for average in self._averages:
            if average.model in models:
                average.restart()

    def _rescale_codecs(self, ratio: float) -> None:
        if ratio != 1:
            for codec in self._codecs:
                codec.rescale(ratio)

    def _load_codecs(self, states: list[dict[str, Any]], group: EngineGroup) -> None:
        """What a codec has kept belongs to the parameters that it was kept for: without a state it keeps nothing."""
        models = [parallel.model for parallel in self._parallel] + [replicas.model for replicas in self._local]
        for codec, kept, model in itertools.zip_longest(self._codecs, states, models):
            by = kept["name"] if kept is not None else "none"
            takes = codec is not None and kept is not None and can_take(self._config.part(CompressConfig), by)
            if codec is not None:
                codec.load_state_dict(kept["kept"] if takes else {}, group)
            if by != "none" and not takes:
                assert kept is not None
                momenta = {**kept["kept"].get("velocity", {}), **kept["kept"].get("whole", {})}
                parameters = dict(model.named_parameters()) if model is not None else {}
                goes_on = return_momenta(parameters, self._optimizers, momenta) if momenta else set()
                mine = f"compress={self._config.compress}" if codec is not None else "a job that compresses nothing"
                lost = "the momentum that it has kept too" if momenta.keys() - goes_on else "what it has held back"
                warnings.warn(f"the checkpoint is of compress={by}: {mine} leaves out {lost}", stacklevel=4)

    def _told_round(self, done: Round) -> None:
        self._tell("round", **asdict(done))


def called(model: nn.Module, x: Any) -> Any:
    """The model's output: a tuple or list is its arguments, a dict its keywords."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, (tuple, list)) else model(x)


def _lengths(
    loader: Loader | LeasedLoader,
) -> tuple[int | None, int | None, Callable[[int], int], Callable[[], int | None]]:
    script, job = loader.batch_sizes or (None, None)
    return script, job, loader.steps_in, lambda: loader.global_batch
