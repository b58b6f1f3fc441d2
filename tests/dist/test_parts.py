"""Models in parts whose outputs, parameters or loops are not the plain ones compute what one process computes."""

from __future__ import annotations

from pathlib import Path

from launching import FORKED, succeed

SCRIPT = Path(__file__).parent / "scripts" / "parts.py"


def check(workers: int, *cases: str) -> None:
    succeed([*FORKED, "run", "--workers", str(workers), SCRIPT, *cases])


def test_sharded_models() -> None:
    stages = [f"batch=global shard_stage={stage}" for stage in (1, 2, 3)]
    cases = [f"{name}|{stage}" for name in ("outputs", "rows", "chained") for stage in stages]
    check(2, *cases, "averaged|batch=global shard_stage=3 average=ema:0.9", f"assigned|{stages[0]}")


def test_two_workers_that_divide_layers_or_hold_stages() -> None:
    check(2, "averaged|tensor=2 average=ema:0.9", "two_terms|tensor=2", "thawed|pipeline=2 split=blocks.2")
    check(2, "thawed_too_late|pipeline=2 split=blocks.1")


def test_four_workers() -> None:
    uneven = ["thawed|pipeline=[3,1] split=blocks.2", "now_and_then|pipeline=[3,1] micro_batches=4 split=blocks.2"]
    check(4, *uneven, "without_samples|batch=global pipeline=2 data=2")
