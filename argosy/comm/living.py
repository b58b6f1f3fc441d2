"""Sums over the workers that are there, for jobs that go on without those that are lost."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from argosy.control.meetings import Meetings

_MEETING_BYTES: Final = 8 << 20
"""What all workers may give at one meeting: the coordinator's reply has all of it, in text."""


def add_up(tensor: Tensor, meetings: Meetings, world: int) -> None:
    """Replace a tensor of float64 by the sum of those that the workers who are there gave, in the order of ranks."""
    for part in tensor.view(-1).split(max(_MEETING_BYTES // world // 8, 1)):
        told = meetings.meet(part.numpy().tobytes())
        if any(len(each) != len(told[0]) for each in told):
            raise ValueError(f"workers gave {[len(each) // 8 for each in told]} numbers: they must have the same shape")
        part.copy_(torch.stack([torch.frombuffer(bytearray(each), dtype=torch.float64) for each in told]).sum(0))
