"""Clipping by the global norm."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from argosy.comm.group import SoloGroup
from argosy.parallel.clip import clip_by_global_norm


def test_entries_of_one_row_are_one_gradient() -> None:
    table = nn.Parameter(torch.zeros(4, 2))
    twice = torch.tensor([[1, 1, 3]]), torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 12.0]])
    table.grad = torch.sparse_coo_tensor(*twice, (4, 2))
    assert not table.grad.is_coalesced()
    assert clip_by_global_norm([table], 1.0, SoloGroup(), holders=1) == pytest.approx(13)
    assert float(table.grad.to_dense().norm()) == pytest.approx(1, abs=1e-5)
