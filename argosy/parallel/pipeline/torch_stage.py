"""Stages and schedules of torch.distributed.pipelining, for our stages.

Three things are ours. Shapes are told to torch instead of found out by it: its own way sends pickled objects between
the workers, and runs the model once more. Each micro-batch has shapes of its own, so that batches need not divide
evenly. And work is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining._utils import _TensorMeta
from torch.distributed.pipelining.stage import _RecvInfo

from argosy.parallel.pipeline.bubble import Action, Meter, in_line
from argosy.parallel.pipeline.config import Schedule
from argosy.parallel.pipeline.stage_module import StageModule
from argosy.parallel.pipeline.trace import Meta

Metas = tuple[Meta, ...]


class TorchStage(PipelineStage):
    """One stage. `received` and `sent` have the shapes that cross its ends, for each micro-batch."""

    def __init__(
        self,
        module: StageModule,
        stage: int,
        stages: int,
        group: dist.ProcessGroup,
        received: Sequence[Metas],
        sent: Sequence[Metas],
        meter: Meter,
    ) -> None:
        super().__init__(
            module,
            stage,
            stages,
            module.device,
            input_args=tuple(map(_example, received[0])),
            output_args=tuple(map(_example, sent[0])),
            group=group,
        )
        self._module, self._received, self._sent, self._meter = module, received, sent, meter
        self._whole: set[int] = set()  # micro-batches whose backward has run whole, though it was asked for in parts

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Forward, timed, of the micro-batch with this number."""
        self._module.chunk = fwd_chunk_id
        with self._meter.working():
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Backward, timed. What goes back is contiguous, and zeros where nothing depends on what was sent.

        torch finds the weights of a backward in two parts on the way to inputs that need a gradient. Where none does,
        behind frozen layers, it would find none: there, backward runs whole.
        """
        apart = not full_backward and (self.is_first or any(m.requires_grad for m in self._received[bwd_chunk_id]))
        with self._meter.working():
            super().backward_one_chunk(bwd_chunk_id, loss, not apart, last_backward)
            if not full_backward and not apart:
                self._whole.add(bwd_chunk_id)
            self.bwd_cache[bwd_chunk_id] = tuple(
                _sendable(gradient, meta, self.device)
                for gradient, meta in zip(self.bwd_cache[bwd_chunk_id], self._received[bwd_chunk_id], strict=True)
            )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Backward for weights only, timed, unless it has run whole."""
        if bwd_chunk_id in self._whole:
            self._whole.remove(bwd_chunk_id)
            return
        with self._meter.working():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        self.args_recv_info = {
            chunk: tuple(
                _RecvInfo(f"stage {self.stage_index}", self.stage_index - 1, _buffer(meta, self.device), _told(meta))
                for meta in self._received[chunk]
            )
            for chunk in range(num_microbatches)
        }

    def _setup_forward_send_info(self) -> None:
        # The last stage returns a loss, which is not sent.
        self.act_send_info = (
            {0: []} if self.is_last else {at: [self.stage_index + 1] for at in range(len(self._sent[0]))}
        )

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        self.chunks = num_microbatches
        self.grad_recv_info = {
            chunk: tuple(
                _RecvInfo(
                    f"gradient of stage {self.stage_index}",
                    self.stage_index + 1,
                    _buffer(meta, self.device) if meta.requires_grad else None,
                    _told(meta) if meta.requires_grad else None,
                )
                for meta in self._sent[chunk]
            )
            for chunk in range(num_microbatches)
        }


class TorchSchedule:
    """A schedule with the stages of this worker."""

    def __init__(self, kind: Schedule, stages: list[TorchStage], micro_batches: int) -> None:
        options: dict[str, Any] = {"loss_fn": _already_a_loss, "scale_grads": False}
        self._kind, self._count, self._workers = kind, micro_batches, stages[0].group_size
        self._schedule: Any
        if kind == "gpipe":
            self._schedule = ScheduleGPipe(stages[0], micro_batches, **options)
        elif kind == "1f1b":
            self._schedule = Schedule1F1B(stages[0], micro_batches, **options)
        elif kind == "interleaved":
            self._schedule = ScheduleInterleaved1F1B(stages, micro_batches, **options)  # type: ignore[arg-type]
        else:
            self._schedule = ScheduleZBVZeroBubble(stages, micro_batches, **options)  # type: ignore[arg-type]

    def run(self) -> None:
        """One step: forward and backward of all micro-batches."""
        # The stages have their inputs and targets; torch wants a target for each micro-batch, whatever it is.
        self._schedule.step(target=torch.arange(self._count), return_outputs=False)

    def programs(self) -> dict[int, list[Action]]:
        """What each worker of the pipeline does, in order."""
        if self._kind in ("gpipe", "1f1b"):  # torch's own list for 1f1b is not what it runs
            return in_line(self._workers, self._count, ahead=self._kind == "gpipe")
        return {
            worker: [
                Action(action.computation_type.value, action.stage_index, action.microbatch_index)
                for action in actions
                if action is not None and action.microbatch_index is not None
            ]
            for worker, actions in self._schedule.pipeline_order.items()
        }


def stages_of(kind: Schedule, worker: int, workers: int, stages: int) -> list[int]:
    """The stages that a worker has: in a loop over the workers, or there and back for `zero-bubble`.

    >>> stages_of("interleaved", 0, 2, 4), stages_of("zero-bubble", 0, 2, 4)
    ([0, 2], [0, 3])
    """
    if kind == "zero-bubble":
        return [worker, stages - 1 - worker]
    return list(range(worker, stages, workers))


def _already_a_loss(loss: Tensor, target: Tensor) -> Tensor:
    return loss


def _example(meta: Meta) -> Tensor:
    return torch.empty(meta.shape, dtype=meta.dtype, device="meta", requires_grad=meta.requires_grad)


def _buffer(meta: Meta, device: torch.device) -> Tensor:
    return torch.empty(meta.shape, dtype=meta.dtype, device=device)


def _told(meta: Meta) -> _TensorMeta:
    return _TensorMeta.from_tensor(_example(meta))


def _sendable(gradient: Tensor | None, meta: Meta, device: torch.device) -> Tensor | None:
    if not meta.requires_grad:
        return None
    return torch.zeros(meta.shape, dtype=meta.dtype, device=device) if gradient is None else gradient.contiguous()
