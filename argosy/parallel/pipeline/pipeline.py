"""A pipeline of equal stages along an axis of the mesh, on torch's schedules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from argosy.parallel.pipeline.config import PipelineConfig
from argosy.parallel.pipeline.cutting import Cutting
from argosy.parallel.pipeline.ghost import signature
from argosy.parallel.pipeline.links import TorchLinks
from argosy.parallel.pipeline.micro_batches import MicroBatch
from argosy.parallel.pipeline.staged import Staged
from argosy.parallel.pipeline.torch_stage import TorchSchedule, TorchStage, stages_of

_SCHEDULES_KEPT = 4  # each has buffers for all that it receives


class Pipeline(Staged):
    """A model whose layers are divided among the workers of an axis.

    `mesh` is that axis, a slice of the job's mesh. `world` is the group of all workers of the job (by default torch's
    own), whose first one decides where to cut; `built` is called when the model is cut and before anything runs: the
    time to shard `stage_modules` over other axes.
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
        self._group = mesh.get_group()
        links = TorchLinks(self._group)
        config.check_workers(links.size)
        count = config.stage_count(links.size)
        places = {
            stage: (worker,)
            for worker in range(links.size)
            for stage in stages_of(config.schedule, worker, links.size, count)
        }
        everybody = TorchLinks(world if world is not None else dist.distributed_c10d._get_default_group())
        super().__init__(Cutting(model, config.split_names()), config, places, links, everybody, show, built)
        self._schedules: OrderedDict[Hashable, TorchSchedule] = OrderedDict()

    def _micro_batches_for(self, samples: int) -> int:
        return self._config.micro_batches_for(self._links.size, samples)

    def _prepared(self, batch: Sequence[MicroBatch]) -> Callable[[], None]:
        key = (self.model.training, *(signature((part.args, part.kwargs)) for part in batch))
        if key not in self._schedules:
            stages = []
            for number, module in zip(self.stages, self.stage_modules, strict=True):
                received, sent = (
                    [self._cutting.crossing(end, part) for part in batch] for end in self.parts.bounds(number)
                )
                count = len(self._workers)
                stages.append(TorchStage(module, number, count, self._group, received, sent, self._meter))
            self._schedules[key] = TorchSchedule(self._config.schedule, stages, len(batch))
            self._play(self._schedules[key].programs())
            while len(self._schedules) > _SCHEDULES_KEPT:
                self._schedules.popitem(last=False)
        self._schedules.move_to_end(key)
        return self._schedules[key].run
