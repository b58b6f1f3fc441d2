"""Synchronous data parallelism: every worker holds the whole model, and each step's gradient is the whole job's.

`DataParallel` changes nothing about the model but to listen: it broadcasts parameters and buffers from rank 0 once,
then, in every backward pass, replaces each gradient by the mean over all samples of all workers (`reducer.py` has how).
So what stands between `backward()` and `optimizer.step()`, clipping for instance, sees what one process would see.

[Note: weighted by samples]
A script's loss is a mean over its batch. If worker r holds n_r of the step's N samples, the gradient that one process
would have computed is sum_r (n_r / N) g_r: weighted by samples, not by workers. Buffers that have changed follow the
same rule (`buffers.py`). A worker with no sample adds exact zeros, whatever its gradients hold (`nothing.py`).

[Note: accumulating]
Calling backward twice before a step reduces twice. That is right, if wasteful: the weights sum to one, so what is
already averaged, and equal on all workers, comes out of the second average as it went in. Inside `no_sync()` nothing is
reduced, and the next pass outside takes what has been added up. Batches may be of different sizes, so from the first
such pass on until that next one, gradients are weighted as they come, before autograd adds them up. With `accumulate=k`
the loader says which of k batches closes the step; until then the sum waits in the bucket, and `p.grad` is None.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from argosy.comm.engine import EngineGroup
from argosy.comm.group import Group
from argosy.compress.codec import Codec
from argosy.data.cursor import Cursor
from argosy.parallel.buckets import Place
from argosy.parallel.buffers import Buffers, average
from argosy.parallel.config import ReducerConfig
from argosy.parallel.hooks import Hook
from argosy.parallel.meeting import Meeting
from argosy.parallel.nothing import tolerate_empty_batches
from argosy.parallel.passes import Member, SharedPasses, at_end_of_pass
from argosy.parallel.reducer import Reducer
from argosy.parallel.replicas import broadcast_tensor, make_alike
from argosy.parallel.sparse import sum_sparse
from argosy.parallel.sync_batchnorm import Forward, synchronise_statistics
from argosy.parallel.trained import Trained


class DataParallel(Member):
    """Keeps one model's replicas the same on all workers of a group. `number` tells it from the job's other models."""

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        cursor: Cursor,
        number: int = 0,
        config: ReducerConfig | None = None,
        codec: Codec | None = None,
        accumulate: int = 1,
        passes: SharedPasses | None = None,
    ) -> None:
        """`passes`: those that the model shares with others that are reduced over the same group."""
        config = config or ReducerConfig()
        self.model, self.codec = model, codec
        self._group, self._cursor, self._accumulate = group, cursor, accumulate
        self._meeting = Meeting(group, cursor, number)
        self._used: set[nn.Parameter] = set()  # by anyone, in any step, if there is a codec
        self._hooks: list[RemovableHandle | Forward] = []
        self._sparse: set[nn.Parameter] = set()  # whose gradients have been sparse
        self._aside: dict[nn.Parameter, Tensor] = {}  # of these, what batches before the last one of a step have given
        self._passes = passes or SharedPasses(group)
        self._begun: tuple[int, int] | None = None  # the step that batches are being added up for
        self._closes, self._pass_weight = True, cast(float | None, None)  # of the pass under way
        self._is_reduced = False  # whether a pass was, since the last step
        self._keeps_frozen = False  # whether buckets have parameters that were frozen on the way
        self._quiet = False
        self._quiet_passes: set[int] = set()
        self._weighs_each = False  # whether gradients are weighted as they come: see [Note: accumulating]
        self._weighing: dict[nn.Parameter, RemovableHandle] = {}
        _refuse_unseen(model, codec)
        make_alike(model, group)
        self._buffers = Buffers(model)
        self.reducer: Reducer | None = None
        engine = cast(EngineGroup, group)
        if group.size > 1 or accumulate > 1:
            bucket_bytes = round(config.bucket_mbytes * (1 << 20))
            self.reducer = Reducer(engine, codec, bucket_bytes, accumulates=accumulate > 1)
        # Statistics travel in the middle of backward, on the same group: gradients then wait until it has ended.
        self._overlaps = not config.sync_batchnorm
        if group.size > 1:
            self._hooks += tolerate_empty_batches(model, lambda: cursor.samples == 0)
            if config.sync_batchnorm:
                self._hooks += synchronise_statistics(model, engine, cursor)
        self._passes.join(self)
        self._trained = Trained(model, self._arrived, codec.meet if codec is not None else lambda *_: None)
        self._lay_out()
        # A frozen parameter may be unfrozen during training: look again at every forward pass.
        self._hooks.append(model.register_forward_pre_hook(Hook(lambda *_: self._listen())))

    def attach(self, optimizer: Optimizer) -> None:
        """Look, before this optimizer steps, whether a pass was missed: one that reached new parameters alone."""
        self._hooks.append(optimizer.register_step_pre_hook(lambda *_: self._before_step()))

    def close(self) -> None:
        """Listen no more: the model is the script's alone again."""
        for hook in (*self._hooks, *self._weighing.values()):
            hook.remove()
        self._trained.close()
        self._passes.leave(self)
        if self.reducer is not None:
            self.reducer.close()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block add gradients up on each worker, and reduce nothing."""
        before, self._quiet = self._quiet, True
        if self.reducer is not None:
            if self._trained.look():
                self._lay_out()
            self._weighs_each = True
            self._weigh_as_they_come()
        try:
            yield
        finally:
            self._quiet = before

    def _listen(self) -> None:
        """A forward pass begins."""
        self._passes.look()
        if not torch.is_grad_enabled():  # nothing is trained, and perhaps on this worker alone
            return
        if self._trained.look():
            self._lay_out()
        if self._weighs_each:
            self._weigh_as_they_come()

    def _before_step(self) -> None:
        is_reduced, self._is_reduced = self._is_reduced, False
        if is_reduced or self.reducer is None or self._quiet or not self._cursor.closes:
            return
        with self._cursor.waiting():
            if self._catch_up(self.reducer):
                self._make_alike()
                self._lay_out()

    def _make_alike(self) -> None:
        """Give all workers the same new parameters: they have got them at the same place in the script."""
        for parameter in self._trained.strangers:
            broadcast_tensor(parameter, self._group)
        self._trained.strangers.clear()

    def _weigh_as_they_come(self) -> None:
        for parameter in self._trained.names:
            if parameter.requires_grad and parameter not in self._weighing:
                self._weighing[parameter] = parameter.register_hook(self._weighed)

    def _weighed(self, gradient: Tensor) -> Tensor | None:
        """A gradient, before it is added to those of other passes, as much as it counts beside the other workers'."""
        weight = self._cursor.share(self._group.size) * self._group.size
        if not self._weighs_each or weight == 1:
            return None
        return gradient * weight if weight else torch.zeros_like(gradient)

    def _lay_out(self) -> None:
        """Make buckets for what is trained now. In a step that is open, what was frozen since has a gradient still."""
        if self.reducer is None:
            return
        for parameter in self._weighing.keys() - self._trained.names.keys():  # the model has it no more
            self._weighing.pop(parameter).remove()
        self._used &= self._trained.names.keys()
        self._sparse &= self._trained.names.keys()
        is_open = self._weighs_each or self._begun is not None
        dense = [
            (name, parameter)
            for parameter, name in self._trained.names.items()
            if parameter not in self._sparse and (parameter.requires_grad or (is_open and self.reducer.has(parameter)))
        ]
        self._keeps_frozen = not all(parameter.requires_grad for _, parameter in dense)
        self.reducer.lay_out(dense)

    def _arrived(self, parameter: Tensor) -> None:
        """A gradient is there."""
        if self._quiet:
            at_end_of_pass(self._quiet_passes, self._cursor.keep_loss)
            return
        gradient = parameter.grad
        if self._passes.reach(self, self._cursor):
            self._begin()
            parameter.grad = gradient  # which was taken for one of a pass before, if that has failed
        if self.reducer is None or parameter.grad is None:
            return
        if self._sparse and parameter in self._sparse and parameter.grad.layout == torch.strided:
            parameter.grad = parameter.grad.to_sparse(1)  # as other passes' are: it has no place in a bucket
        if parameter.grad.layout == torch.strided:
            if self.reducer.has(parameter):  # or it is late: see `_catch_up`
                self.reducer.add(cast(nn.Parameter, parameter), self._pass_weight, last=self._closes)
        elif self._accumulate > 1:
            self._put_aside(cast(nn.Parameter, parameter))

    def _put_aside(self, parameter: nn.Parameter) -> None:
        """Add a sparse gradient, weighted, to those of the step's other batches."""
        grad, share = parameter.grad, self._cursor.share(self._group.size)
        assert grad is not None
        if _is_sparse(grad, self._trained.names[parameter]) and share:
            held = self._aside.get(parameter)
            self._aside[parameter] = grad * share if held is None else held + grad * share
        parameter.grad = None

    def _begin(self) -> None:
        """The first gradient of a pass has come."""
        at = self._cursor.at
        self._closes, self._pass_weight = self._cursor.closes, self._weight()
        if self._accumulate > 1 and at is None:
            raise RuntimeError(
                f"accumulate={self._accumulate} adds up batches of a distributed DataLoader, and this backward pass is "
                f"outside the loop over one; give the DataLoader to fleet.distribute, or use fleet.no_sync() instead"
            )
        if self.codec is not None:
            self.codec.begin_step(self._cursor.epochs)
        if self.reducer is not None:
            self.reducer.overlap = self._overlaps and self._passes.has_one_model
            if at is not None and at.opens and self._begun != (at.epoch, at.step):
                self.reducer.drop()  # a step that was broken off
                self._aside.clear()
            self._begun = (at.epoch, at.step) if at is not None else None

    def aborted(self) -> None:
        """Forget the gradients of a pass that has failed."""
        self._aside.clear()
        if self.reducer is not None:
            self.reducer.abort()

    def ended(self) -> None:
        """Reduce what a pass has left; or keep it, if more batches are to be added."""
        if not self._cursor.closes:
            self._cursor.keep_loss()
        elif self.reducer is not None:
            try:
                with self._cursor.waiting():
                    self._reduce(self.reducer)
            except Exception:
                with suppress(Exception):  # the first one counts
                    self.aborted()
                raise
        else:
            self._cursor.have_own_loss()

    def _reduce(self, reducer: Reducer) -> None:
        """Bring gradients, and buffers that have changed, to their means, weighted by samples."""
        self._cursor.check_one_weight()
        for parameter, gradient in self._aside.items():
            parameter.grad = gradient
        self._aside.clear()
        used, places = reducer.finish(self._weight()), list(reducer.places)
        is_late = self._catch_up(reducer)
        names, buffers = self._trained.names, self._buffers.all()
        sparse = [_is_sparse(parameter.grad, name) for parameter, name in names.items()]
        users = iter(self._meeting.exchange([*used, *sparse, *self._buffers.changed()]))
        dense_of = [(place, next(users)) for place in places]
        sparse_of = {parameter: by for parameter in names if (by := next(users))}
        self._give(dense_of, sparse_of)
        # Through `data`: a graph that is kept for another backward pass may hold the buffer, at the version it has.
        moved = [buffer.data for buffer in buffers if next(users)]
        average(moved, self._cursor.part(self._group.size), self._group)
        self._buffers.note()
        self._weighs_each, self._begun = False, None
        self._make_alike()
        self._is_reduced = True
        reducer.settle_order()
        if sparse_of or is_late or self._keeps_frozen:
            self._lay_out()

    def _catch_up(self, reducer: Reducer) -> bool:
        """Average gradients of parameters that no bucket has; whether the model has changed since its last forward.

        They were thawed or added in the meantime, or the script goes past the model's own forward.
        """
        if not self._trained.look():
            return False
        wanted = (parameter for parameter in self._trained.names if parameter.requires_grad)
        late = [parameter for parameter in wanted if parameter not in self._sparse and not reducer.has(parameter)]
        if not late:
            return True
        if self._accumulate > 1 or self._weighs_each or (self.codec is not None and self.codec.takes_over):
            raise RuntimeError(
                f"parameter {self._trained.names[late[0]]} was thawed, added or replaced, and the model has not been "
                f"called since: where batches are added up, or compress=dgc steps, its gradient would be lost in part; "
                f"call the model itself, and not its parts alone, before the first backward pass after such a change"
            )
        dense = [parameter.grad is not None and parameter.grad.layout == torch.strided for parameter in late]
        users = torch.tensor([float(here) for here in dense])
        self._group.all_reduce(users)
        gradients = [p.grad if here else torch.zeros_like(p) for p, here in zip(late, dense, strict=True)]
        average([gradient.data for gradient in gradients if gradient is not None], self._share(), self._group)
        for parameter, gradient, by in zip(late, gradients, users.tolist(), strict=True):
            if by:
                parameter.grad = gradient
        return True

    def _give(self, dense_of: list[tuple[Place, float]], sparse_of: dict[nn.Parameter, float]) -> None:
        """Let gradients be their sums, where anybody had one; how many had is told with each."""
        for place, users in dense_of:
            # A codec may bring what it has kept of earlier steps.
            if self.codec is not None and self.codec.keeps and users:
                self._used.add(place.parameter)
            if place.parameter in sparse_of and not users:
                self._used.discard(place.parameter)  # it goes another way from now on
            elif users or (self._used and place.parameter in self._used and place.parameter.requires_grad):
                place.give()
            else:
                place.parameter.grad = None  # what a worker without a sample may have made of nothing
        if sparse_of:
            dense = {place.parameter for place, users in dense_of if users}
            for parameter in sparse_of:
                self._sum_sparse(parameter, alone=parameter not in dense)

    def _weight(self) -> float | None:
        """What gradients are multiplied by before they are added up; None if all workers count the same."""
        even = self._cursor.is_even or self._weighs_each
        return None if even and self.codec is None and self._accumulate == 1 else self._share()

    def _share(self) -> float:
        return 1 / self._group.size if self._weighs_each else self._cursor.share(self._group.size)

    def _sum_sparse(self, parameter: nn.Parameter, alone: bool) -> None:
        name = self._trained.names[parameter]
        if not alone:
            raise RuntimeError(
                f"the gradient of {name} is sparse on some workers, or in some batches of this step, and dense in "
                f"others; let it be one of both, by the layer's sparse= for instance"
            )
        if self.codec is not None and self.codec.takes_over:
            raise NotImplementedError(
                f"the gradient of {name} is sparse, and compress=dgc, which applies momentum and weight decay itself, "
                f"takes dense ones; use sparse=False, or another codec"
            )
        self._sparse.add(parameter)
        weight = self._share() if self._accumulate == 1 else 1.0  # what was put aside is weighted
        sum_sparse(parameter, weight, cast(EngineGroup, self._group))


def _refuse_unseen(model: nn.Module, codec: Codec | None) -> None:
    for name, parameter in model.named_parameters():
        if codec is not None and codec.takes_over and parameter.dtype != torch.float32:
            raise ValueError(
                f"parameter {name} is {parameter.dtype}, and compress=dgc, which applies momentum and weight decay "
                f"itself, takes torch.float32; use model.float(), or another codec"
            )


def _is_sparse(grad: Tensor | None, name: str) -> bool:
    if grad is None or grad.layout == torch.strided:
        return False
    if grad.layout != torch.sparse_coo or grad.sparse_dim() != 1:
        raise NotImplementedError(
            f"the gradient of {name} is {grad.layout}: data parallelism averages dense gradients, and sparse ones that "
            f"index rows, as those of nn.Embedding(sparse=True)"
        )
    return True
