"""Deep gradient compression (Lin et al., 2018): one number in a thousand is sent, and training hardly notices.

Each worker adds its share of the gradient to a momentum of its own, and that to what it has not sent yet; the largest
sums are sent and forgotten (`sparse.py`). Beyond top-k, what makes it work is

- momentum correction: u = m u + g, v = v + u, and v is what is sent. A number that waits for a hundred steps takes all
  that momentum would have done meanwhile along with it. With Nesterov's momentum u = m (u + g), v = v + u + g.
- momentum factor masking: where v was sent, u is zero too, so old momentum does not carry a parameter too far.
- warm-up: sparsity rises over the first epochs, while gradients change fast.
- clipping of local gradients, if asked for.

Only tensors of two or more dimensions and 16,384 elements are treated so; the rest are summed whole, and momentum is
applied to the sum.

[Note: SGD's own result]
Momentum and weight decay are applied here, so SGD does without them (`takeover.py`). All of this is linear: if
everything is sent, the sum of the workers' u is the u of the sum, and the result is SGD's own. For that u must not be
masked, and need not be: what arrives at once has no stale momentum. So it is at sparsity 0, and whenever a bucket is
cheaper to send whole. Weight decay, wd * p, is split equally among the workers, before momentum.

[Note: clipping]
A share is weighted by its samples already: it is the paper's local gradient, which has 1 / (N b) in it too, and the sum
of shares is the gradient. Of N independent shares whose sum has the norm c, each has about c N^-1/2: that is what a
share's norm is limited to, before weight decay. It is the norm of each tensor by itself (as in Paddle): that of a whole
gradient is known only when backward has ended, and by then most of it has been sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from argosy._native import sparse_drain
from argosy.comm.engine import EngineGroup
from argosy.comm.pending import Pending
from argosy.compress.codec import Bucket, Part
from argosy.compress.descent import Landed
from argosy.compress.sparse import Exchange, Kept, Rule, SparseCodec, numbers_of, of_size
from argosy.compress.takeover import TakenOver, check_optimizer

MIN_ELEMENTS: Final = 16_384
WARMUP: Final = (0.75, 0.9375, 0.984375, 0.996)


def sparsity_at(epoch: float, final: float, warmup_epochs: int) -> float:
    """The sparsity after so many epochs: stages of equal length, none beyond the final value.

    >>> [sparsity_at(epoch, 0.999, 4) for epoch in (0, 0.9, 1, 2, 3, 4)]
    [0.75, 0.75, 0.9375, 0.984375, 0.996, 0.999]
    """
    if epoch >= warmup_epochs:
        return final
    return min(WARMUP[int(epoch / warmup_epochs * len(WARMUP))], final)


class DgcCodec(SparseCodec):
    """DGC for models trained by `torch.optim.SGD`; `clip` is for the whole job, as if one process clipped."""

    takes_over = True

    def __init__(
        self,
        sparsity: float = 0.999,
        warmup_epochs: int = 4,
        clip: float | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__(exchange)
        self._final, self._warmup_epochs, self._clip = sparsity, warmup_epochs, clip
        self._sparsity = sparsity_at(0, sparsity, warmup_epochs)
        self._taken: list[TakenOver] = []
        self._velocity: dict[str, Tensor] = {}  # of small tensors: the same on all workers

    def check(self, optimizer: Optimizer) -> None:
        """Only SGD's momentum is known."""
        check_optimizer(optimizer)

    def attach(self, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer) -> None:
        """Take momentum and weight decay over from SGD; several optimizers may share a model."""
        for taken in [taken for taken in self._taken if taken.optimizer is optimizer]:
            taken.close()
            self._taken.remove(taken)
        self._taken.append(TakenOver(parameters, optimizer))

    def meet(self, name: str, parameter: nn.Parameter) -> None:
        """Of a parameter that is new nothing was kept; an optimizer may have it."""
        super().meet(name, parameter)
        self._velocity.pop(name, None)
        for taken in self._taken:
            taken.meet(name, parameter)

    def begin_step(self, epoch: float | None) -> None:
        """Take the sparsity of this epoch."""
        if epoch is None and self._warmup_epochs:
            raise RuntimeError(
                f"dgc_warmup_epochs={self._warmup_epochs} counts epochs of a distributed DataLoader, and this backward "
                f"pass is outside the loop over one; give the DataLoader to fleet.distribute, or say "
                f"dgc_warmup_epochs=0"
            )
        self._sparsity = sparsity_at(epoch or 0.0, self._final, self._warmup_epochs)
        for taken in self._taken:
            taken.look()

    def abort(self) -> None:
        """What was taken into momentum stays there; another pass may come."""
        for taken in self._taken:
            taken.forget()

    def suits(self, part: Part) -> bool:
        """Matrices and the like, large ones."""
        return len(part.shape) >= 2 and part.end - part.begin >= MIN_ELEMENTS

    def fraction(self) -> float:
        """What is left at the present sparsity."""
        return 1.0 - self._sparsity

    def steps(self, bucket: Bucket, group: EngineGroup) -> Iterator[Pending]:
        """As all sparse codecs do, once it is known what steps."""
        if not self._taken:
            raise RuntimeError(
                "compress=dgc applies momentum and weight decay itself, and does not know the optimizer; give it to "
                "fleet.distribute together with the model: fleet.distribute(model, optimizer, loader)"
            )
        for taken in self._taken:
            taken.use(part.name for part in bucket.parts)
        yield from super().steps(bucket, group)

    def rule(self, part: Part, share: Tensor, weight: float, group: EngineGroup) -> Rule:
        """The weight, clipping, this worker's part of weight decay, and momentum."""
        rule = self._rule(part.name)
        return replace(rule, scale=self._scale(share, weight, group), decay=rule.decay / group.size)

    def land(self, part: Part, total: Tensor, gaps: Tensor) -> None:
        """Let the optimizer's step know where the sum is not zero."""
        for taken in self._taken:
            if taken.knows(part.name):
                taken.land(part.name, Landed.of(total, gaps))

    def prepare(self, part: Part, share: Tensor, group: EngineGroup) -> None:
        """Clip a small tensor."""
        scale = self._scale(share, 1.0, group)
        if scale != 1.0:
            share.mul_(scale)

    def finish(self, part: Part, total: Tensor) -> None:
        """Apply weight decay and momentum to a small tensor's sum."""
        rule = self._rule(part.name)
        velocity = None
        if rule.momentum:
            velocity = self._velocity[part.name] = of_size(self._velocity.get(part.name), part)
        else:
            self._velocity.pop(part.name, None)
        if rule.momentum or rule.decay:
            sparse_drain(*numbers_of(total, Kept(velocity=velocity), rule))

    def state_dict(self, group: EngineGroup) -> dict[str, Any]:
        """What all workers have kept, added up, and the momentum that is the same on all."""
        whole = {name: velocity.clone() for name, velocity in sorted(self._velocity.items())}
        return {**super().state_dict(group), "whole": whole}

    def load_state_dict(self, state: dict[str, Any], group: EngineGroup) -> None:
        """Take this worker's part of what was kept, and all of what is the same on all.

        A checkpoint of a run without DGC has SGD's momentum instead: it goes on as DGC's.
        """
        momenta = {name: momentum for taken in self._taken for name, momentum in taken.momenta().items()}
        if not state:
            large = {name for name, m in momenta.items() if self.suits(Part(name, tuple(m.shape), 0, m.numel()))}
            state = {"velocity": {name: momenta.pop(name) for name in sorted(large)}, "whole": momenta}
        super().load_state_dict(state, group)
        whole = state["whole"]
        self._velocity = {name: value.to(torch.float32).reshape(-1).clone() for name, value in whole.items()}

    def _rule(self, name: str) -> Rule:
        """A parameter that no optimizer has gets neither momentum nor decay: whoever uses its gradient applies them."""
        for taken in self._taken:
            if taken.knows(name):
                momentum, nesterov, decay = taken.hyperparameters(name)
                return Rule(
                    decay=decay,
                    parameter=taken.flat(name) if decay else None,
                    momentum=momentum,
                    nesterov=nesterov,
                )
        return Rule()

    def _scale(self, share: Tensor, weight: float, group: EngineGroup) -> float:
        """The weight, or less: see [Note: clipping]. What is not finite is not clipped, to be seen by all."""
        if self._clip is None:
            return weight
        limit = self._clip * group.size**-0.5
        norm = weight * float(torch.linalg.vector_norm(share, dtype=torch.float64))
        return weight * limit / norm if limit < norm < float("inf") else weight
