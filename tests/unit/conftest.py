"""Fixtures of the unit tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "net"


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """For tensors that are small, torch's threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
