"""Steps that do not wait for everybody: which batches a worker leaves out that is behind.

Where a step is over when enough workers have done it (`ps=sync aggregate=k`), one that was late would be late for ever
if it went on batch by batch: the gradients of each would come when the step is over. So its loader leaves out the
batches whose steps are over, and the worker takes part in the step that is open now. All workers then end an epoch with
the same step.

That needs loops in which each batch of the loader is one step, and that is seen in the loop itself: a loader whose
batches are followed by one step each leaves out, and any other, such as one of an evaluation, gives all it has.
"""

from __future__ import annotations

from typing import Protocol


class CommonSteps(Protocol):
    """The steps of a job that may go on without this worker."""

    @property
    def made(self) -> int:
        """Steps that this worker has made, or passed over."""

    @property
    def over(self) -> int:
        """Steps that are over, as far as this worker knows: what it makes for them is dropped."""

    def pass_over(self) -> None:
        """Count one more step as made."""

    def catch_up(self) -> None:
        """Take what the steps have come to that were passed over."""


class Pace:
    """Which batches of one loader are left out.

    >>> class Steps:
    ...     made, over = 0, 0
    ...     def pass_over(self): self.made += 1
    ...     def catch_up(self): pass
    >>> steps = Steps()
    >>> pace, given = Pace(steps), []
    >>> for batch in range(6):
    ...     if not pace.passes():
    ...         given.append(batch)
    ...         steps.made, steps.over = steps.made + 1, 4  # while it made the first one, others made four
    >>> given
    [0, 4, 5]
    """

    def __init__(self, steps: CommonSteps | None) -> None:
        self._steps = steps
        self._is_a_step: bool | None = None  # whether a batch is: not known before the first one
        self._given_at: int | None = None  # the step in which the last batch was given
        self._passed = False

    def passes(self) -> bool:
        """Whether the next batch is left out, as its step is over."""
        steps = self._steps
        if steps is None:
            return False
        self.come_back()
        if self._is_a_step and steps.over > steps.made:
            steps.pass_over()
            self._passed = True
            return True
        if self._passed:
            steps.catch_up()
            self._passed = False
        self._given_at = steps.made
        return False

    def come_back(self) -> None:
        """The script is through with the batch that it was given."""
        if self._steps is not None and self._given_at is not None:
            self._is_a_step = self._is_a_step is not False and self._steps.made == self._given_at + 1
            self._given_at = None

    def end(self) -> None:
        """An epoch ends."""
        self.come_back()
        if self._steps is not None and self._passed:
            self._steps.catch_up()
            self._passed = False

    def break_off(self) -> None:
        """The script has left its loop: it is not known whether the last batch was a step."""
        self._given_at = None
