"""Mistakes that would be a hang, or silently wrong training, are errors that say what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import FORKED, run, succeed

SCRIPT = Path(__file__).parent / "scripts" / "misuse.py"


def job(name: str, *options: str) -> list[str | Path]:
    return [*FORKED, "run", "-n", "2", "--run-folder", "run", *options, SCRIPT, name]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("skip_a_batch", ["out of step", "of epoch 0"]),
        ("two_loaders", ["several loaders", "no single weight"]),
        ("no_sync_around_a_step", ["fleet.step is a whole step", "accumulate=k"]),
        ("no_sync_and_accumulate", ["fleet.no_sync() and accumulate=2 both say", "leave out one of the two"]),
        ("distribute_twice", ["Linear is distributed already"]),
        ("other_shapes", ["must be the same on all workers", "rank 0 has [weight (1, 3)", "rank 1 has [weight (2, 3)"]),
        ("other_data", ["the data must be the same", "40 samples", "41 samples"]),
        (
            "other_tables",
            [
                "the tables of Net must be the same on all workers: rank 0 has [table 'people': optimizer=SGD(lr=0.1, ",
                "rank 1 has [table 'people': optimizer=SGD(lr=0.2, ",
            ],
        ),
    ],
)
def test_a_mistake_is_an_error_with_a_reason(name: str, said: list[str]) -> None:
    strategies = {
        "two_loaders": ["batch=global"],
        "other_tables": ["ps=async", "--servers", "1"],
        "no_sync_and_accumulate": ["accumulate=2"],
    }
    options = ["--strategy", *strategies[name]] if name in strategies else []
    done = run(job(name, *options))
    assert done.status == 1
    assert all(words in done.err for words in said), done.err
    assert "CommError" not in done.err


def test_a_job_can_be_left_and_joined_again() -> None:
    assert "joined three times" in succeed(job("join_again")).out


def test_a_group_that_was_left_has_no_threads() -> None:
    succeed(job("leave"))


@pytest.mark.parametrize("name", ["backward_twice_with_buffers", "held_iterator"])
def test_what_one_process_can_do_two_can(name: str) -> None:
    succeed(job(name, "--strategy", "batch=global"))


def test_replicas_that_train_alone_become_one_where_it_is_promised() -> None:
    succeed(job("trained_alone", "--strategy", "sync=local:4"))


def test_an_average_is_that_of_its_own_model() -> None:
    succeed(job("load_a_teacher", "--strategy", "average=ema:0.9"))


def test_a_model_that_comes_back_is_weighted_by_samples() -> None:
    succeed(job("weights_after_joining_again", "--strategy", "batch=global"))


def test_two_optimizers_in_turn_count_a_step_once() -> None:
    succeed(job("two_optimizers"))
    events = [json.loads(line) for line in Path("run/rank0.events.jsonl").read_text().splitlines()]
    assert [event["batch"] for event in events if event["event"] == "step"] == [0, 1, 2, 3]


def test_a_script_may_change_its_folder() -> None:
    succeed(job("change_folder"))
    assert Path("run/net/step-00000000/manifest.json").exists()
    last = Path("run/rank1.events.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["status"] == "done"


def test_reentrant_checkpointing_gives_the_mean_gradient() -> None:
    succeed(job("reentrant_checkpoint"))


def test_what_an_outer_job_was_told_is_not_for_an_inner_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import argosy; print('seed', argosy.init().strategy.seed)")
    done = succeed([*FORKED, "run", script], ARGOSY_STRATEGY="seed=3", ARGOSY_RANK="5")
    assert "seed 0" in done.out


def test_an_option_given_at_its_default_value_still_counts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import argosy; argosy.init('batch=global')")
    done = run([*FORKED, "run", "--strategy", "batch=per-worker", script])
    assert done.status == 1
    assert "keep one of the two" in done.err
