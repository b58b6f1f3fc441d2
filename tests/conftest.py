"""Fixtures for all tests. `launching.py` beside this file starts real jobs."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test works in a folder of its own and knows nothing of a job around it."""
    monkeypatch.chdir(tmp_path)
    for name in ("ARGOSY_RANK", "ARGOSY_SECRET", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
