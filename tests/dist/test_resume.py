"""A checkpoint continues the run that made it, on any number of workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from launching import ARGOSY, FORKED, run, succeed
from safetensors.torch import load_file

SCRIPT = Path(__file__).parent / "scripts" / "resume.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt.py"


def train(
    workers: int, out: str, *arguments: str, strategy: str = "batch=global", command: Sequence[str] = FORKED
) -> list[float]:
    succeed([*command, "run", "--workers", str(workers), "--strategy", strategy, SCRIPT, out, *arguments])
    return json.loads(Path(out).read_text())


def test_a_run_saved_on_two_workers_goes_on_with_three() -> None:
    whole = train(1, "whole.json", "4", "-", "-")
    first = train(2, "first.json", "2", "-", "net", command=ARGOSY)
    second = train(3, "second.json", "2", "net", "-", command=ARGOSY)
    assert len(whole) == 20
    assert max(abs(a - b) for a, b in zip(whole, first + second, strict=True)) < 1e-5
    (step,) = Path("net").iterdir()
    assert step.name == "step-00000010"
    stored = {name for file in step.glob("*.safetensors") for name in load_file(file)}
    parameters = {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert {f"model/{name}" for name in parameters} <= stored
    assert {f"optimizer/state/{name}/exp_avg" for name in parameters} <= stored
    assert Path("net.safetensors").exists()
    assert set(load_file("net.safetensors")) == parameters


def test_a_run_saved_in_the_middle_of_an_epoch_goes_on_there() -> None:
    whole = train(1, "whole.json", "4", "-", "-")
    first = train(3, "first.json", "2", "-", "net", "2")
    second = train(2, "second.json", "3", "net", "net")
    assert (len(first), len(second)) == (7, 13)
    steps = sorted(path.name for path in Path("net").iterdir())
    assert steps == ["step-00000005", "step-00000007", "step-00000020"], "counting goes on where it was"
    assert max(abs(a - b) for a, b in zip(whole, first + second, strict=True)) < 1e-5


def test_a_run_saved_in_shards_goes_on_with_replicas() -> None:
    whole = train(1, "whole.json", "3", "-", "-")
    first = train(2, "first.json", "2", "-", "net", strategy="shard=2 shard_stage=3 batch=global")
    second = train(2, "second.json", "1", "net", "-")
    assert max(abs(a - b) for a, b in zip(whole, first + second, strict=True)) < 1e-5


def test_the_example_goes_on_from_whatever_is_there() -> None:
    """Also from nothing but what a first save that was killed has left, and where it is done already."""

    def train(workers: int, steps: int) -> str:
        small = {"layers": 1, "width": 16, "heads": 2, "length": 16, "batch": 4, "kbytes": 4, "save-every": 4}
        chosen = [f"--{name}={value}" for name, value in {**small, "save": "net", "steps": steps}.items()]
        return succeed([*FORKED, "run", "--workers", str(workers), EXAMPLE, *chosen]).out

    Path("net/.aside-step-00000000-0").mkdir(parents=True)
    assert "going on" not in train(2, 6)
    assert sorted(path.name for path in Path("net").iterdir()) == ["step-00000004", "step-00000006"]
    said = train(1, 21)
    assert "going on after 6 steps" in said
    assert "after 21 steps" in said
    assert sorted(path.name for path in Path("net").iterdir()) == [f"step-000000{step}" for step in (16, 20, 21)]
    assert "loss" not in train(1, 21)


def test_a_checkpoint_that_may_be_missing_is_one_answer_on_all_workers() -> None:
    said = succeed([*FORKED, "run", "--workers", "2", SCRIPT.parent / "missing.py"]).out
    assert sorted(line.partition("] ")[2] for line in said.splitlines() if "found" in line) == ["found False True"] * 2


def test_what_cannot_be_loaded_is_said_on_every_worker() -> None:
    finished = run([*FORKED, "run", "--workers", "2", SCRIPT, "out.json", "1", "nowhere", "-"])
    assert finished.status == 1
    assert "CheckpointError" in finished.err
    assert "no checkpoint at nowhere" in finished.err
