"""Hooks right around an optimizer's step: after all others before it, and before all others after it.

torch calls hooks in the order in which they were registered. What is changed for the step alone (hyperparameters that
are set aside, gradients that are away) must not be seen by the script's own hooks, and what these do to gradients must
have been done before anything is decided.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


class StepHooks:
    """Calls `before(whether the step has a closure)` and `after()`, the latter only if the step has not raised."""

    def __init__(self, optimizer: Optimizer, before: Callable[[bool], None], after: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._before = optimizer.register_step_pre_hook(
            # The first argument is the optimizer.
            lambda _, arguments, words: before(any(each is not None for each in (*arguments[1:], *words.values())))
        )
        self._after = optimizer.register_step_post_hook(lambda *_: after())
        _in_order(optimizer._optimizer_step_post_hooks).move_to_end(self._after.id, last=False)

    @property
    def are_nearest(self) -> bool:
        """Whether no other hook comes between `before` and the step: others may have been registered since."""
        return bool(next(reversed(self._optimizer._optimizer_step_pre_hooks)) == self._before.id)

    def come_nearest(self) -> None:
        """From the next step on. Not to be called while hooks before a step run."""
        _in_order(self._optimizer._optimizer_step_pre_hooks).move_to_end(self._before.id)

    def remove(self) -> None:
        """Call nothing any more."""
        self._before.remove()
        self._after.remove()


def _in_order(hooks: dict[int, Any]) -> OrderedDict[int, Any]:
    assert isinstance(hooks, OrderedDict)  # torch makes one of these, whatever it declares
    return hooks
