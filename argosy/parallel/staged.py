"""Models in stages, in training: a whole step through the pipeline, with gradients that are the whole job's.

A pipeline takes whole steps, because forward and backward of its micro-batches are interleaved. What a script would do
between `backward()` and `optimizer.step()` is done here: batches are added up, gradients are clipped, the loss of all
readers is told. Replicas of a stage, along the data and shard axes, are torch's `fully_shard`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from argosy.comm.group import Group
from argosy.data.cursor import Cursor
from argosy.parallel.aside import Aside
from argosy.parallel.buffers import Buffers
from argosy.parallel.clip import clip_by_global_norm
from argosy.parallel.meeting import Meeting
from argosy.parallel.pipeline.staged import Staged


class StagedModel:
    """A model in stages. `replicas` has the axes that its readers stand along; none if all see the same samples."""

    def __init__(
        self, pipeline: Staged, group: Group, cursor: Cursor, number: int, readers: int, replicas: list[DeviceMesh]
    ) -> None:
        self.pipeline, self.model = pipeline, pipeline.model
        self._group, self._cursor, self._readers, self._replicas = group, cursor, readers, replicas
        self._meeting = Meeting(group, cursor, number)
        self._aside = Aside(self.model, cursor)
        self._buffers: Buffers | None = None

    def backward(self, x: Any, y: Any, loss_fn: Callable[[Any, Any], Tensor]) -> Tensor:
        """Forward and backward of a batch; the gradients are there if it closes its step. The reader's mean loss."""
        self._aside.begin()
        self.pipeline.build(x)  # which runs the model on one worker, and leaves its buffers as they were
        if self._readers > 1 and self._buffers is None:
            self._buffers = Buffers(self.model)
        loss = self.pipeline.step(x, y, loss_fn, self._cursor.share(self._readers) * self._readers)
        self._cursor.loss = float(loss)
        if not self._cursor.closes:
            self._cursor.keep_loss()
            self._aside.put()
            return loss
        self._aside.take()
        with self._cursor.waiting():
            self._meeting.exchange([])
            self._average_buffers()
        return loss

    def clip(self, most: float) -> None:
        """Clip gradients by the norm over all stages, in which each tied weight counts once."""
        owned = self.pipeline.owned()
        counted = {id(parameter) for name, parameter in self.model.named_parameters() if name in owned}
        holders = self._group.size // self.pipeline.workers
        clip_by_global_norm(self.model.parameters(), most, self._group, holders, counted)

    def _average_buffers(self) -> None:
        """Buffers that a replica of the stage has changed become the mean over all; of whole numbers, the first's."""
        if self._buffers is None or not self._buffers.all():
            return
        weight, first = self._cursor.part(self._readers), all(axis.get_local_rank() == 0 for axis in self._replicas)
        changed = self._sum(torch.tensor(self._buffers.changed(), dtype=torch.int64))
        for buffer in (b.data for b, users in zip(self._buffers.all(), changed.tolist(), strict=True) if users):
            if buffer.is_floating_point():
                buffer.copy_(self._sum(buffer * weight if weight else torch.zeros_like(buffer)))
            else:
                buffer.copy_(self._sum(buffer.to(torch.int64) * first))
        self._buffers.note()

    def _sum(self, tensor: Tensor) -> Tensor:
        """Over all replicas of the stage."""
        for axis in self._replicas:
            dist.all_reduce(tensor, group=axis.get_group())
        return tensor
