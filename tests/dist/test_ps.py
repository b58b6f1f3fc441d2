"""Training with servers, through the launcher: `sync` computes what one process computes, the others learn as well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launching import FORKED, succeed
from safetensors.torch import load_file
from torch import Tensor

SCRIPT = Path(__file__).parent / "scripts" / "ps.py"
MODES = ["async", "async:dc", "ssp:2", "half-async:4", "geo:8"]
WITHIN = 0.005


def trained(folder: Path, workers: int, servers: int, strategy: str, epochs: int = 2) -> dict[str, Tensor]:
    """What rank 0 holds in the end."""
    file = folder / f"{workers} {servers} {strategy}.safetensors"
    command = [*FORKED, "run", "--workers", str(workers), "--threads", "1"]
    command += ["--servers", str(servers)] if servers else []
    succeed([*command, "--strategy", strategy, SCRIPT, file, str(epochs)], deadline_seconds=100)
    return load_file(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ps")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Tensor]:
    return trained(folder, 1, 0, "ps=sync")


@pytest.mark.parametrize(
    ("workers", "servers", "strategy"),
    [
        (1, 1, "ps=sync"),
        (2, 2, "ps=sync batch=global"),
        (4, 2, "ps=sync batch=global"),
        (2, 1, "ps=sync batch=global dense=allreduce"),
    ],
)
def test_sync_computes_what_one_process_computes(
    alone: dict[str, Tensor], folder: Path, workers: int, servers: int, strategy: str
) -> None:
    told = trained(folder, workers, servers, strategy)
    assert len(alone["losses"]) == 102
    assert alone["losses"][-10:].mean() < alone["losses"][:10].mean() - 0.05
    for name in alone.keys() - {"losses", "auc"}:
        torch.testing.assert_close(told[name], alone[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_learns_as_one_process_does(folder: Path, mode: str) -> None:
    exact = _exact(folder)
    told = trained(folder, 2, 2, f"ps={mode}", epochs=6)
    assert exact["auc"] > 0.7
    assert told["auc"] > exact["auc"] - WITHIN
    assert told["rows"][0] == told["rows"][1]


def _exact(folder: Path) -> dict[str, Tensor]:
    file = folder / "1 0 .safetensors"
    return load_file(file) if file.exists() else trained(folder, 1, 0, "", epochs=6)


EXACT = Path(__file__).parent / "scripts" / "ps_exact.py"


@pytest.fixture(scope="module")
def exact_alone(folder: Path) -> tuple[Tensor, Tensor]:
    return computed(folder / "alone.json", [])


def computed(file: Path, options: list[str]) -> tuple[Tensor, Tensor]:
    succeed([*FORKED, "run", "--workers", "1", *options, EXACT, file], deadline_seconds=60)
    sums, moments = json.loads(file.read_text())
    return torch.tensor(sums), torch.tensor(moments)


@pytest.mark.parametrize(
    "mode", ["sync", "async", "half-async:3", "half-async:3 dense=allreduce", "geo:3", "geo:3 dense=allreduce"]
)
def test_one_worker_computes_what_one_process_computes(
    exact_alone: tuple[Tensor, Tensor], tmp_path: Path, mode: str
) -> None:
    """Also when steps are left at the end of a loop that are not sent yet, and in a job that is joined anew."""
    sums, moments = computed(tmp_path / "served.json", ["--servers", "2", "--strategy", f"ps={mode}"])
    assert exact_alone[0][0, 0] == 1 - 111111.11
    torch.testing.assert_close(sums, exact_alone[0])
    assert exact_alone[1][0, 0] != 1
    if not mode.startswith("half-async"):  # there Adam sees sums of gradients
        torch.testing.assert_close(moments, exact_alone[1], rtol=1e-5, atol=1e-5)
