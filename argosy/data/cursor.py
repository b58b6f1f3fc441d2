"""The cursor: the batch that is being trained on now.

The loader moves it, the gradient average reads this worker's sample count from it, and the events are told from it.
One per job, made by `Fleet` and handed to those three.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """A batch: its place in the epoch, this worker's samples and the whole job's."""

    epoch: int
    step: int
    steps: int
    samples: int
    total: int


@dataclass
class Cursor:
    """Where the job is.

    `weight` is how much this worker counts in a mean: the samples of the batch in hand or, when a loop over a loader
    has ended, the samples that it saw in that loop. `loss` is this worker's, as the script reported it, and
    `mean_loss` the whole job's.
    """

    at: Position | None = None
    weight: float = 1.0
    loss: float | None = None
    mean_loss: float | None = None

    def move(self, position: Position) -> None:
        """Begin another batch."""
        if self.loss is not None:
            warnings.warn(
                "fleet.report(loss) came after loss.backward(), so the loss was not shown: it travels with the "
                "gradients; report it before",
                stacklevel=3,
            )
        self.at, self.weight, self.loss = position, position.samples, None

    def leave(self, outside: Position | None, seen: int) -> None:
        """A loop has ended after `seen` samples. Loops nest: training goes on where an evaluation inside it began."""
        self.at, self.weight = outside, seen

    def take_loss(self) -> float | None:
        """The reported loss, once."""
        loss, self.loss = self.loss, None
        return loss

    @property
    def samples(self) -> float:
        """How much this worker's gradients count: its samples or, outside a distributed loader's loop, 1."""
        return 1 if self.at is None else self.at.samples
