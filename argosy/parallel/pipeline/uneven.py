"""A pipeline whose stages have different numbers of workers: `pipeline=[3,1]` has three for the first stage.

The workers of a stage take micro-batches in turn (`turn_schedule.py`), over plain sends of the engine's group. At the
end of a step their gradients are added up, so that they stay the same bit for bit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from argosy.comm.engine import EngineGroup
from argosy.config import ConfigError
from argosy.parallel.pipeline.bubble import Action
from argosy.parallel.pipeline.config import PipelineConfig
from argosy.parallel.pipeline.cutting import Cutting
from argosy.parallel.pipeline.links import EngineLinks
from argosy.parallel.pipeline.micro_batches import MicroBatch
from argosy.parallel.pipeline.stage_module import LossFunction
from argosy.parallel.pipeline.staged import Staged
from argosy.parallel.pipeline.ties import make_one
from argosy.parallel.pipeline.turn_run import TurnRun
from argosy.parallel.pipeline.turn_schedule import places, turn_programs


class UnevenPipeline(Staged):
    """A model whose stages have `counts` workers each. All workers of `group` are in it, taken in `order`.

    `devices` has the device of each stage, if they differ; messages go through the memory of the hosts.
    """

    def __init__(
        self,
        model: nn.Module,
        group: EngineGroup,
        counts: Sequence[int],
        config: PipelineConfig,
        show: Callable[[str], None],
        *,
        order: Sequence[int] | None = None,
        devices: Sequence[str] | None = None,
        built: Callable[[UnevenPipeline], None] | None = None,
    ) -> None:
        self._counts = tuple(counts)
        _check(self._counts, group.size, config, devices)
        links = EngineLinks(group, tuple(order) if order is not None else tuple(range(group.size)))
        workers = places(self._counts)
        (stage,) = (stage for stage, members in workers.items() if links.rank in members)
        self._device = torch.device(devices[stage]) if devices is not None else None
        if self._device is not None:
            model.to(self._device)
        super().__init__(Cutting(model, config.split_names()), config, workers, links, links, show, built)
        self._programs: dict[int, list[Action]] = {}

    def step(self, x: Any, y: Any, loss_fn: LossFunction, scale: float = 1.0) -> Tensor:
        """As in any pipeline; the batch goes to the stage's device."""
        x, y = self._here(x), self._here(y)
        self.build(x)
        before = self._versions()
        loss = super().step(x, y, loss_fn, scale)
        self._share_buffers(before)
        return loss

    def forward(self, x: Any) -> Any:
        """As in any pipeline; the batch goes to the stage's device, where the output is."""
        return super().forward(self._here(x))

    def _versions(self) -> dict[str, tuple[int, int]]:
        """What of the buffers tells whether they were changed."""
        return {name: (id(buffer), buffer._version) for name, buffer in self.model.named_buffers()}

    def _share_buffers(self, before: dict[str, tuple[int, int]]) -> None:
        """Make buffers that the stage has changed (statistics of batch norm) the same on all of its workers."""
        workers, now = self._workers[self.stages[0]], self._versions()
        if len(workers) == 1:
            return
        learning = [layer for layer in self.model.modules() if isinstance(layer, _NormBase) and layer.training]
        running = {id(value) for layer in learning for value in (layer.running_mean, layer.running_var)}
        mine = {name for name, stages in self.parts.stages_of.items() if stages == (self.stages[0],)}
        names = [name for name in now if name in mine]
        # Running statistics change without a new version. Workers of a stage may have had more turns than others.
        changed = torch.tensor([float(now[name] != before.get(name) or now[name][0] in running) for name in names])
        make_one([changed], workers, self._links)
        make_one([self.model.get_buffer(name) for name in itertools.compress(names, changed)], workers, self._links)

    def _here(self, value: Any) -> Any:
        if self._device is None:
            return value
        return pytree.tree_map(lambda leaf: leaf.to(self._device) if isinstance(leaf, Tensor) else leaf, value)

    def _micro_batches_for(self, samples: int) -> int:
        if self._config.micro_batches is not None:
            return self._config.micro_batches
        turn = math.lcm(*self._counts)  # so many, and each worker of a stage has equally many
        return turn * max(1, min(math.ceil(4 * max(self._counts) / turn), samples // turn))

    def _prepared(self, batch: Sequence[MicroBatch]) -> Callable[[], None]:
        if not self._programs:
            self._programs = turn_programs(self._counts, self.micro_batches)
            self._play(self._programs, dict(enumerate(map(float, self._counts))))
        received, sent = (
            [self._cutting.crossing(end, part) for part in batch] for end in self.parts.bounds(self.stages[0])
        )
        run = TurnRun(self.stage_modules[0], self._links, self._owner, received, sent, self._meter)
        return lambda: run.run(self._programs[self._links.rank])


def _check(counts: tuple[int, ...], workers: int, config: PipelineConfig, devices: Sequence[str] | None) -> None:
    spelled = f"[{','.join(map(str, counts))}]"
    if len(counts) < 2 or min(counts) < 1 or sum(counts) != workers:
        fix = f"expected the workers of each of two or more stages, {workers} in all, such as [{workers - 1},1]"
        raise ConfigError("pipeline", spelled, fix)
    config.check_turns(counts)
    if devices is not None and len(devices) != len(counts):
        raise ConfigError("devices", ",".join(devices), f"expected one for each of the {len(counts)} stages")
