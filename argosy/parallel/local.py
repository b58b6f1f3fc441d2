"""Fewer synchronisations: every worker trains its own replica, and the replicas become one every k steps.

`LocalReplicas` reduces no gradient. It counts the optimizer's steps, and after every k-th of them all workers meet in a
round: parameters and buffers become the same on all, by the mean or by DiLoCo's outer step (`outer.py`), each worker
weighted by the samples that it has trained on since the last round. Of several optimizers that train parts of a model,
the one counts that has made the most steps, and a round waits for the others, until the next forward pass at most.

[Note: alike between rounds]
Between rounds replicas differ. They are the same after a round, and a round is made early wherever the script is likely
to look: when a loop over a distributed loader begins and when it has run to its end, and in `synchronise()`, which
whoever saves or evaluates calls before. All of these are places that all workers pass alike.

[Note: the optimizer's state]
Momentum and the like stay each worker's own, as in DiLoCo and in post-local SGD (T. Lin and others, Don't Use Large
Mini-Batches, Use Local SGD, 2020), whose accuracy was shown that way. Averaging them too would double or triple what
a round sends. A checkpoint holds rank 0's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from argosy.comm.group import Group
from argosy.compress.codec import Codec
from argosy.data.cursor import Cursor
from argosy.parallel.buffers import Buffers
from argosy.parallel.hooks import Hook
from argosy.parallel.local_config import LocalConfig, Rounds
from argosy.parallel.nothing import tolerate_empty_batches
from argosy.parallel.outer import Averaging, Mean, Nesterov, Outer
from argosy.parallel.passes import Passes
from argosy.parallel.period import Period
from argosy.parallel.replicas import broadcast_tensor, make_alike


@dataclass(frozen=True)
class Round:
    """What a round did, for events: all but `seconds` and `sent_bytes` is the same on all workers."""

    number: int
    steps: int
    samples: float
    loss: float | None
    next_period: int
    sent_bytes: int
    seconds: float


class LocalReplicas:
    """One model's replicas, made one every so often. `number` tells the model from the job's other ones."""

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        cursor: Cursor,
        config: LocalConfig,
        number: int = 0,
        told: Callable[[Round], None] | None = None,
    ) -> None:
        self._plan = config.rounds()
        if self._plan.kind == "step":
            raise ValueError("sync=step reduces gradients: that is DataParallel's work")
        self.model, self._group, self._cursor, self._number, self._told = model, group, cursor, number, told
        self.rounds = 0
        self._period = self._first_period()
        self._optimizers: list[Optimizer] = []
        make_alike(model, group)
        self._buffers = Buffers(model)
        self._spared: list[tuple[Tensor, Tensor]] = []
        self._averaging = Averaging(group)
        self._small_bytes = 0
        self._parameters = dict(model.named_parameters())
        self._codec = _codec(self._plan)
        self._outer = self._make_outer(config)
        self._begin()
        self._hooks: list[RemovableHandle] = []
        self._listen()

    @property
    def period(self) -> int:
        """Steps between rounds, at present."""
        return self._period.steps

    @property
    def bytes_sent(self) -> int:
        """What this worker has handed to operations in all rounds."""
        return self._averaging.bytes_sent + self._outer.bytes_sent + self._small_bytes

    def attach(self, optimizer: Optimizer) -> bool:
        """Count an optimizer's steps, if it trains this model. Says whether it does.

        Attach before any other hook that reads `cursor.mean_loss` after a step: a round sets it to the whole job's.
        """
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not any(id(parameter) in held for parameter in self._parameters.values()):
            return False
        number = len(self._optimizers)
        self._optimizers.append(optimizer)
        self._stepped.append(0)
        if self._codec is not None:
            self._codec.attach(self._parameters, optimizer)
        self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.stepped(number)))
        return True

    def stepped(self, number: int = 0) -> None:
        """A step is over. An optimizer's hook says so; whoever leaves out an optimizer's step must say it instead."""
        self._stepped[number] += 1
        self._fresh_samples = 0.0
        if min(self._stepped) >= self.period:
            self.synchronise()

    @property
    def _steps(self) -> int:
        """How many there were since the last round."""
        return max(self._stepped, default=0)

    def _catch_up(self) -> None:
        """The script goes on to the next step: whichever optimizer has not stepped by now does not."""
        if self.model.training and torch.is_grad_enabled() and self._steps >= self.period:
            self.synchronise()

    def synchronise(self) -> None:
        """Make the replicas one now, unless they are. All workers call this. See [Note: alike between rounds]."""
        if not self._steps:
            return
        with torch.inference_mode(False), torch.no_grad(), self._cursor.waiting():
            self._meet()

    def state_dict(self, group: Group) -> dict[str, Any]:
        """What a checkpoint keeps beside the model, after a round; all workers call this and get the same."""
        self.synchronise()
        return {
            "kind": self._plan.kind,
            "rounds": self.rounds,
            "period": self._period.state_dict(),
            "outer": self._outer.state_dict(group),
        }

    def load_state_dict(self, state: dict[str, Any], group: Group) -> None:
        """Go on from a checkpoint, on any number of workers, after the model was loaded from it."""
        if state["kind"] != self._plan.kind:
            warnings.warn(
                f"the checkpoint was made under sync={state['kind']} and the job runs sync={self._plan.kind}: "
                f"what the rounds remember begins anew",
                stacklevel=2,
            )
            self.restart(group)
            return
        self._begin()
        self.rounds = state["rounds"]
        self._period.load_state_dict(state["period"])
        with torch.no_grad():
            self._outer.load_state_dict(state["outer"], group)

    def restart(self, group: Group) -> None:
        """Go on from the parameters as they are, as if there had been no round: they come from elsewhere."""
        self.rounds, self._period = 0, self._first_period()
        with torch.no_grad():
            self._outer.forget(group)
        self._begin()

    def close(self) -> None:
        """Listen no more: the model is the script's alone again, and no round is made."""
        self._passes.close()
        for hook in self._hooks:
            hook.remove()
        if self.synchronise in self._cursor.between_loops:
            self._cursor.between_loops.remove(self.synchronise)

    def _first_period(self) -> Period:
        return Period(self._plan.period, adapts=self._plan.kind == "adaptive")

    def _make_outer(self, config: LocalConfig) -> Outer:
        if self._plan.kind != "diloco":
            return Mean(self._parameters, self._averaging)
        return Nesterov(self._parameters, self._group, config.outer_lr, config.outer_momentum, self._codec)

    def _listen(self) -> None:
        self._passes = Passes(self.model, self._backward_ended)
        self._cursor.between_loops.append(self.synchronise)
        # Whoever loads the model does so on all workers: rounds begin there.
        self._hooks.append(self.model.register_load_state_dict_post_hook(Hook(self._loaded)))
        self._hooks.append(self.model.register_forward_pre_hook(Hook(lambda *_: self._catch_up())))
        if self._group.size > 1:
            self._hooks.append(self.model.register_forward_pre_hook(Hook(lambda *_: self._spare_buffers())))
            self._hooks += tolerate_empty_batches(self.model, lambda: self._cursor.samples == 0)

    def _loaded(self, module: nn.Module, _: Any) -> None:
        if module is self.model:  # a deep copy of the model has its hooks too
            self._begin()

    def _begin(self) -> None:
        """The replicas are the same from here on."""
        with torch.no_grad():
            self._outer.begin()
        self._start_over()

    def _start_over(self) -> None:
        self._stepped = [0] * len(self._optimizers)  # by each of them, since the last round
        self._samples = self._fresh_samples = 0.0  # trained on since the last round, and since the last step
        self._reported, self._losses = 0.0, 0.0
        self._versions = [parameter._version for parameter in self._parameters.values()]
        self._buffers.note()

    def _spare_buffers(self) -> None:
        """Keep what an empty batch, filled with stand-ins, would do to running statistics from them."""
        if self._cursor.samples == 0 and self.model.training and not self._spared:
            self._spared = [(buffer, buffer.clone()) for buffer in self._buffers.all()]

    def _backward_ended(self) -> None:
        if not self._optimizers:
            raise RuntimeError(
                f"sync={self._plan.kind}:{self._plan.period} counts the optimizer's steps, and the optimizer of this "
                f"{type(self.model).__name__} is not known: give it to fleet.distribute too"
            )
        samples, loss = self._cursor.samples, self._cursor.take_loss()
        self._cursor.check_one_weight()
        if samples == 0:
            self._leave_no_trace()
        self._samples += samples
        self._fresh_samples += samples
        if loss is not None:
            self._cursor.mean_loss = loss  # this worker's own: between rounds nothing is exchanged
            if samples:
                self._reported += samples
                self._losses += samples * loss

    def _leave_no_trace(self) -> None:
        """Leave no trace of a batch without a sample: an optimizer passes over parameters without a gradient."""
        for buffer, before in self._spared:
            buffer.data.copy_(before)
        self._spared = []
        if not self._fresh_samples:
            for parameter in self._parameters.values():
                parameter.grad = None

    def _check_unchanged(self) -> None:
        for name, parameter in self.model.named_parameters():
            if self._parameters.get(name) is not parameter:
                raise RuntimeError(
                    f"parameter {name} was added or replaced after the model was distributed, and rounds of "
                    f"sync={self._plan.kind} do not know it: its replicas would stay different; change the model "
                    f"before distribute, or use sync=step"
                )

    def _meet(self) -> None:
        """A round."""
        self._check_unchanged()
        begun, sent = self._cursor.clock(), self.bytes_sent
        versions = [parameter._version for parameter in self._parameters.values()]
        moved = [
            parameter.requires_grad or now != before
            for parameter, now, before in zip(self._parameters.values(), versions, self._versions, strict=True)
        ]
        weight, total, loss, flags = self._count([*moved, *self._buffers.changed()])
        if self._codec is not None:
            self._codec.begin_step(self._cursor.epochs)
        self._outer.meet(weight, flags[: len(moved)])
        drifted = [buffer for buffer, differs in zip(self._buffers.all(), flags[len(moved) :], strict=True) if differs]
        self._averaging.average([buffer for buffer in drifted if _has_mean(buffer)], weight)
        for buffer in drifted:
            if not _has_mean(buffer):
                broadcast_tensor(buffer.data, self._group)
        self.rounds += 1
        steps = self._steps
        self._start_over()
        self._period.learn(loss)
        if loss is not None:
            self._cursor.mean_loss = loss
        if self._told is not None:
            seconds = self._cursor.clock() - begun
            self._told(Round(self.rounds, steps, total, loss, self.period, self.bytes_sent - sent, seconds))

    def _count(self, flags: list[bool]) -> tuple[float, float, float | None, list[bool]]:
        """This worker's weight, the job's samples, its mean loss since the last round, and the flags anybody raises.

        Workers that are not at the same step would average what does not belong together: it is checked here.
        """
        at = self._cursor.at
        place = [self._number, self.rounds, self._steps, *((at.epoch, at.step) if at else (-1, -1))]
        sums = torch.tensor([self._samples, self._reported, self._losses, *place, *flags], dtype=torch.float64)
        self._group.all_reduce(sums)
        self._small_bytes += sums.numel() * sums.itemsize
        total, reported, losses = sums[:3].tolist()
        told, raised = sums[3 : 3 + len(place)].tolist(), sums[3 + len(place) :].tolist()
        if told != [self._group.size * where for where in place]:
            where = f"batch {at.step} of epoch {at.epoch}" if at else "outside the loop over a distributed loader"
            raise RuntimeError(
                f"workers are out of step: rank {self._group.rank} is {self._steps} steps after round {self.rounds}, "
                f"at {where}, and others elsewhere; all must take the same optimizer steps"
            )
        weight = self._samples / total if total else 1 / self._group.size
        return weight, total, losses / reported if reported else None, [flag > 0 for flag in raised]


def _codec(plan: Rounds) -> Codec | None:
    if plan.bits is None:
        return None
    from argosy.compress.quantised import QuantisedCodec  # only where it is asked for

    return QuantisedCodec(bits=plan.bits)


def _has_mean(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()
