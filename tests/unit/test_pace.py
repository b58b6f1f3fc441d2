"""Where steps do not wait for everybody: which batches a worker leaves out that is behind."""

import pytest
import torch
from loader_harness import alone
from torch.utils.data import DataLoader

from argosy.data.cursor import Cursor


class _Ahead:
    """Steps of a job of which this worker makes some; `over` is set by the test."""

    def __init__(self) -> None:
        self.made = self.over = self.passed = self.caught_up = 0

    def pass_over(self) -> None:
        self.made += 1
        self.passed += 1

    def catch_up(self) -> None:
        self.caught_up += 1


def test_batches_of_steps_that_are_over_are_left_out() -> None:
    cursor, steps = Cursor(), _Ahead()
    cursor.common = steps
    script = DataLoader(torch.arange(10), batch_size=1)
    loader = alone(script, cursor)
    got = []
    for epoch in range(2):
        for batch in loader:
            got.append((epoch, int(batch)))
            steps.over = {0: 0, 1: 4, 8: 13}.get(steps.made, steps.over)  # others: at step 4, and in the next epoch
            steps.made += 1
    assert got == [(0, n) for n in (0, 1, 4, 5, 6, 7, 8)] + [(1, n) for n in range(3, 10)]
    assert (steps.made, steps.passed) == (20, 6)
    assert steps.caught_up == 3  # before a batch is got after some were left out, and at the end of an epoch
    assert cursor.weight == 7  # the samples that it saw


@pytest.mark.parametrize("every", [0, 2])
def test_nothing_is_left_out_where_a_batch_is_no_step(every: int) -> None:
    cursor, steps = Cursor(), _Ahead()
    cursor.common = steps
    loader = alone(DataLoader(torch.arange(6), batch_size=1), cursor)
    for _ in range(2):
        got = []
        for number, batch in enumerate(loader):
            got.append(int(batch))
            steps.over = 100
            steps.made += bool(every) and number % every == every - 1
        assert got == list(range(6))
