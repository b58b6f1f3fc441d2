"""Sums over the workers that are there, for jobs that go on without those that are lost."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from argosy.control.meetings import Meetings

_MEETING_BYTES: Final = 8 << 20
"""What all workers may give at one meeting: the coordinator's reply has all of it, in text."""


def add_up(tensor: Tensor, meetings: Meetings, world: int) -> None:
    """Replace a tensor of float64 by the sum of those that the workers who are there gave, in the order of ranks.

    A large tensor takes several meetings. Who is lost between two of them counts in none: all numbers are of the same
    workers.
    """
    parts = tensor.view(-1).split(max(_MEETING_BYTES // world // 8, 1))
    told = []
    for part in parts:
        given = meetings.meet(part.numpy().tobytes())
        told.append(dict(zip(meetings.here, given, strict=True)))
        if any(len(each) != len(given[0]) for each in given):
            lengths = [len(each) // 8 for each in given]
            raise ValueError(f"workers gave {lengths} numbers: they must have the same shape")
    for part, by_rank in zip(parts, told, strict=True):
        several = [torch.frombuffer(bytearray(by_rank[rank]), dtype=torch.float64) for rank in meetings.here]
        part.copy_(torch.stack(several).sum(0))
