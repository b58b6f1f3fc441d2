"""How long replicas train alone under `sync=adaptive:k`: the rule of Wang and Joshi's AdaComm.

Far from a minimum, replicas that drift apart all go downhill, and few meetings cost little; near it, the drift is the
noise that keeps the loss from falling further. So the period begins long and shrinks with the square root of the loss:

    period = ceil(k * sqrt(loss / first loss)),  at least 1 and at most k

Both losses are means over all samples of a round, of all workers: the first round's, and the last one's. They are the
same numbers on all workers, and so is the period. (J. Wang and G. Joshi, Adaptive Communication Strategies to Achieve
the Best Error-Runtime Trade-off in Local-Update SGD, 2019. Theirs decides once a minute of the clock and halves the
period where the loss stands still; here each round decides, and nothing depends on a clock.)
"""

from __future__ import annotations

import math


class Period:
    """The steps between two rounds. Fixed, or adapted to the loss."""

    def __init__(self, longest: int, adapts: bool) -> None:
        self.steps = longest
        self.first_loss: float | None = None
        self._longest, self._adapts = longest, adapts

    def learn(self, loss: float | None) -> None:
        """A round has ended with this mean loss over the whole job; None if no worker has told its loss."""
        if not self._adapts:
            return
        if loss is None:
            raise RuntimeError(
                f"sync=adaptive:{self._longest} follows the loss, and no worker has told one since the last round: "
                f"call fleet.report(loss) before loss.backward(), use fleet.step, or choose sync=local:{self._longest}"
            )
        if not math.isfinite(loss):
            return  # of a loss that has burst the rule says nothing: the period stays
        if self.first_loss is None:
            if loss <= 0:
                raise ValueError(
                    f"sync=adaptive:{self._longest} follows the loss down to 0, and the first one is {loss}: "
                    f"choose sync=local:{self._longest} for a loss that may be negative"
                )
            self.first_loss = loss
        self.steps = adapted(self._longest, loss / self.first_loss)

    def state_dict(self) -> dict[str, float | None]:
        """What a checkpoint keeps."""
        return {"first_loss": self.first_loss, "steps": self.steps} if self._adapts else {}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Go on with an earlier run's period."""
        first, steps = state.get("first_loss"), state.get("steps")
        if self._adapts and first is not None and steps is not None:
            self.first_loss, self.steps = first, min(int(steps), self._longest)


def adapted(longest: int, ratio: float) -> int:
    """The period for a loss that is `ratio` times the first one.

    >>> [adapted(16, ratio) for ratio in (2.0, 1.0, 0.25, 0.1, 0.0)]
    [16, 16, 8, 6, 1]
    """
    return min(longest, max(1, math.ceil(longest * math.sqrt(max(ratio, 0.0)))))
