"""Synchronous training computes what one process computes, on any number of workers, however it is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import ARGOSY, FORKED, TORCHRUN, succeed

SCRIPT = Path(__file__).parent / "scripts" / "scenarios.py"
EXACT = ["plain_loop", "whole_step", "clipped_and_scheduled", "accumulated", "branching"]
TOLERANCE = 1e-5

Results = list[dict[str, dict[str, object]]]  # one for each rank


def results(folder: Path) -> Results:
    files = sorted(folder.glob("rank*.json"), key=lambda file: int(file.stem.removeprefix("rank")))
    return [json.loads(file.read_text()) for file in files]


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Results]:
    """All scenarios with 1, 2, 3 and 4 workers that divide the script's batch."""
    made = {}
    for workers in (1, 2, 3, 4):
        folder = tmp_path_factory.mktemp(f"workers{workers}")
        started = ARGOSY if workers == 2 else FORKED  # what differs between real processes differs between two
        succeed([*started, "run", "--workers", str(workers), "--strategy", "batch=global", SCRIPT, folder])
        made[workers] = results(folder)
    return made


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("scenario", EXACT)
def test_losses_are_those_of_one_process(runs: dict[int, Results], scenario: str, workers: int) -> None:
    alone, together = runs[1][0][scenario]["losses"], runs[workers][0][scenario]["losses"]
    assert len(alone) == 50
    assert apart(alone, together) < TOLERANCE
    assert alone[-5:] != alone[:5]


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("scenario", [*EXACT, "batch_norm", "moving_average"])
def test_replicas_are_the_same_bits(runs: dict[int, Results], scenario: str, workers: int) -> None:
    ranks = runs[workers]
    assert len(ranks) == workers
    assert len({rank[scenario]["state"] for rank in ranks}) == 1
    assert all(rank[scenario]["losses"] == ranks[0][scenario]["losses"] for rank in ranks)


def test_batch_per_worker_is_one_process_with_the_larger_batch(runs: dict[int, Results], tmp_path: Path) -> None:
    three, one = tmp_path / "three", tmp_path / "one"
    succeed([*FORKED, "run", "--workers", "3", SCRIPT, three, "plain_loop:8"])
    succeed([*FORKED, "run", "--workers", "1", SCRIPT, one, "plain_loop:24"])
    assert apart(results(three)[2]["plain_loop:8"]["losses"], results(one)[0]["plain_loop:24"]["losses"]) < TOLERANCE


def test_plain_python_is_a_job_of_one(runs: dict[int, Results], tmp_path: Path) -> None:
    import sys

    succeed([sys.executable, SCRIPT, tmp_path / "out", "plain_loop"])
    assert results(tmp_path / "out")[0]["plain_loop"] == runs[1][0]["plain_loop"]


def test_torchrun_starts_the_same_script(runs: dict[int, Results], tmp_path: Path) -> None:
    succeed([*TORCHRUN, "--nproc-per-node=2", SCRIPT, tmp_path / "out", "plain_loop:5"])
    ranks = results(tmp_path / "out")
    assert len(ranks) == 2
    assert apart(ranks[1]["plain_loop:5"]["losses"], runs[1][0]["plain_loop"]["losses"]) < TOLERANCE
    assert ranks[0]["plain_loop:5"]["state"] == ranks[1]["plain_loop:5"]["state"]
