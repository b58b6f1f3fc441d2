"""Fixtures for all tests. `launching.py` beside this file starts real jobs."""

from pathlib import Path

import pytest

from argosy.optim.tiles import avoid_hidden_tiles

avoid_hidden_tiles()  # as `argosy.init` would, for tests that compute in 16 bits without it


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test works in a folder of its own and knows nothing of a job around it."""
    monkeypatch.chdir(tmp_path)
    for name in ("ARGOSY_RANK", "ARGOSY_SECRET", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
