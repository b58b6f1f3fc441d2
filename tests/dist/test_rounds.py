"""Rounds, a gradient that is not finite, and workers of unequal speed, as a script sees them through `fleet`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import FORKED, succeed

SCRIPT = Path(__file__).parent / "scripts" / "rounds.py"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("rounds")
    succeed([*FORKED, "run", "--workers", "2", "--run-folder", folder / "run", SCRIPT, folder])
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    for rank, each in enumerate(ranks):
        lines = (folder / "run" / f"rank{rank}.events.jsonl").read_text().splitlines()
        each["events"] = [json.loads(line) for line in lines]
    return ranks


def test_rounds_start_from_what_was_loaded(told: list[dict[str, Any]]) -> None:
    """Also from a checkpoint that knows no rounds, and without the optimizer."""
    assert all(weight == [[10.0] * 4] for rank in told for weight in rank["loaded"])


def test_a_frozen_layer_stays_whatever_the_outer_momentum(told: list[dict[str, Any]]) -> None:
    for rank in told:
        for first, second in rank["frozen"]:
            assert first == 0
            assert second > 0


def test_momentum_goes_on_without_dgc_also_where_states_are_divided(told: list[dict[str, Any]]) -> None:
    """Without a gradient a step moves a parameter by its momentum alone; and what was loaded can be saved."""
    for rank in told:
        whole, divided = rank["momentum"]
        assert whole > 0.001
        assert divided == pytest.approx(whole, rel=1e-5)


def test_a_gradient_that_is_not_finite_on_one_worker_is_skipped_by_all(told: list[dict[str, Any]]) -> None:
    """The scale of the loss is halved, kept in the checkpoint, and halved again by the job that goes on from it."""
    assert told[0]["overflow"] == told[1]["overflow"]
    for first, second, third in told[0]["overflow"]:
        assert first == second != third
    for rank in told:
        assert [event["scale"] for event in rank["events"] if event["event"] == "overflow"] == [2.0**15, 2.0**14]


def test_shares_follow_the_speed_of_workers_that_meet_within_a_step_too(told: list[dict[str, Any]]) -> None:
    for fast, slow in zip(told[0]["shares"], told[1]["shares"], strict=True):
        assert fast + slow == 64
        assert 1.5 < fast / slow < 6
