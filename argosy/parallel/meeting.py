"""What workers tell each other when a backward pass has ended: the loss, and which of some flags each of them raises.

Workers that are not at the same batch would average what does not belong together: it is checked here.
"""

from __future__ import annotations

import torch

from argosy.comm.group import Group
from argosy.data.cursor import Cursor


class Meeting:
    """Where the workers of a group meet after each pass through one model; `number` tells it from others."""

    def __init__(self, group: Group, cursor: Cursor, number: int) -> None:
        self._group, self._cursor, self._number = group, cursor, number

    def exchange(self, flags: list[bool]) -> list[float]:
        """How many workers raise each flag; the cursor gets the mean loss, which comes with it."""
        losses, reporters = self._cursor.take_losses()
        at = self._cursor.at
        place = [self._number, *((at.epoch, at.step) if at else (-1, -1))]
        sums = torch.tensor([losses, reporters, *place, *flags], dtype=torch.float64)
        self._group.all_reduce(sums)
        losses, reporters, *told = sums.tolist()
        if told[:3] != [self._group.size * where for where in place]:
            where = f"batch {at.step} of epoch {at.epoch}" if at else "a batch of no distributed loader"
            raise RuntimeError(
                f"workers are out of step: rank {self._group.rank} has run backward on {where}, and others elsewhere; "
                f"all must run backward on the same batches (a `continue` on some workers only, say, leaves one out)"
            )
        if reporters:
            self._cursor.mean_loss = losses / reporters
        return told[3:]
