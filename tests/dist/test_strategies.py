"""Strategies, through the launcher and the facade: exact ones compute what one process does, the others come close."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import FORKED, run, succeed

SCRIPT = Path(__file__).parent / "scripts" / "strategies.py"
EXACT = ["batch=global sync_batchnorm=true", "batch=global sync_batchnorm=true accumulate=3 bucket_mbytes=0.01"]
CLOSE = {
    "compress=bf16": 0.02,
    "compress=fp16": 0.02,
    "compress=int8": 0.02,
    "compress=int4": 0.03,
    "compress=sign": 0.15,
    "compress=topk:0.05": 0.15,
    "compress=powersgd:4": 0.1,
    "compress=dgc:0.95 dgc_warmup_epochs=1": 0.15,
    "precision=bf16": 0.03,
    "precision=fp16": 0.03,
    "sync=local:2": 0.1,
    "sync=adaptive:4": 0.15,
    "sync=diloco:4:int4 outer_lr=0.5 outer_momentum=0.3": 0.2,
    "average=ema:0.9 lr_scale=sqrt warmup=1epochs": 0.1,
    "balance=true": 0.02,
    "ramp=2:1epochs": 0.05,
}

Told = dict[str, dict[str, Any]]


def results(folder: Path, workers: int, strategies: list[str]) -> list[Told]:
    """What each rank tells of a run under all strategies."""
    folder.mkdir(exist_ok=True)
    succeed([*FORKED, "run", "--workers", str(workers), SCRIPT, folder, *strategies])
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(workers)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    return results(tmp_path_factory.mktemp("pair"), 2, ["", *EXACT, *CLOSE])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return results(tmp_path_factory.mktemp("alone"), 1, EXACT)[0]


@pytest.mark.parametrize("strategy", EXACT)
def test_exact_strategies_compute_what_one_process_does(pair: list[Told], alone: Told, strategy: str) -> None:
    ours, theirs = pair[0][strategy], alone[strategy]
    assert len(ours["losses"]) == len(theirs["losses"]) == 56
    assert ours["weights"] == pytest.approx(theirs["weights"], abs=2e-4)
    if "accumulate" not in strategy:
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=2e-5)


@pytest.mark.parametrize("strategy", ["", *EXACT, *CLOSE])
def test_replicas_end_with_the_same_bits(pair: list[Told], strategy: str) -> None:
    assert pair[0][strategy]["state"] == pair[1][strategy]["state"]


@pytest.mark.parametrize("strategy", list(CLOSE))
def test_the_others_learn_nearly_as_much(pair: list[Told], strategy: str) -> None:
    assert pair[0][""]["right"] > 0.9
    assert pair[0][strategy]["right"] >= pair[0][""]["right"] - CLOSE[strategy]


def test_what_parts_remember_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    strategy = "compress=dgc:0.95 average=ema:0.9 warmup=1epochs"
    before = results(tmp_path, 2, [f"save|{strategy}"])
    after = results(tmp_path, 3, [f"load|{strategy}"])
    assert len({told[f"load|{strategy}"]["state"] for told in after}) == 1
    averages = before[0][f"save|{strategy}"]["averages"]
    assert all(told[f"load|{strategy}"]["averages"] == averages for told in after)
    assert averages != pytest.approx(before[0][f"save|{strategy}"]["weights"], abs=1e-4)
    assert after[0][f"load|{strategy}"]["right"] >= before[0][f"save|{strategy}"]["right"] - 0.02


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("sync=local:4 compress=int8", "replicas train alone under sync=local:4"),
        ("sync=diloco:8 precision=fp16", "precision decides by gradients that all share"),
        ("sync=local:4 average=ema:0.9", "average follows parameters that are the same on all workers"),
        ("sync=local:4 accumulate=2", "no gradients to reduce less often"),
        ("compress=dgc precision=fp16", "use precision=bf16"),
        ("compress=zip", "expected one of none, fp16, bf16"),
        ("compress=powersgd:0", "the rank is a whole number"),
        ("compress=powersgd:inf", "the rank is a whole number"),
        ("compress=int8 dgc_clip=1", "are for compress=dgc"),
        ("accumulate=0", "a step is made of 1 batch or more"),
    ],
)
def test_what_cannot_work_together_is_refused_before_any_process_starts(strategy: str, said: str) -> None:
    done = run([*FORKED, "run", "--workers", "2", "--strategy", strategy, SCRIPT])
    assert done.status != 0
    assert said in " ".join(done.err.split())
    assert done.seconds < 10
