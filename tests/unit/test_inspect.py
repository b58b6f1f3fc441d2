"""`argosy inspect` shows what a checkpoint holds, and finds what is damaged."""

import re
from pathlib import Path

import pytest
import torch
from kept_states import write
from typer.testing import CliRunner

from argosy.cli.main import app

STATE = {"model": {f"{number}.weight": torch.ones(number + 1, 4) for number in range(30)}, "optimizer": {"lr": 0.1}}


@pytest.fixture
def saved(folder: Path) -> Path:
    write(folder, STATE, step=7, strategy="data=2")
    write(folder, STATE, step=12)
    return folder


def inspect(*arguments: object, columns: int = 200) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["inspect", *map(str, arguments)])
    return result.exit_code, result.stdout


def test_one_step_is_shown_and_verified(saved: Path) -> None:
    status, said = inspect(saved / "step-00000007")
    assert status == 0, said
    for part in (
        "data=2",
        "model, optimizer",
        "30 tensors",
        "the largest 20 tensors",
        "model/29.weight",
        "30 x 4",
        "F32",
    ):
        assert part in said, part
    assert "model/9.weight" not in said
    assert "whole: the SHA-256 of 1 file is right" in said
    status, said = inspect(saved / "step-00000007", "--all")
    assert "model/9.weight" in said


def test_a_folder_of_steps_is_listed(saved: Path) -> None:
    status, said = inspect(saved)
    assert status == 0, said
    lines = [line for line in said.splitlines() if "│ step-" in line]
    assert ["step-00000012" in lines[0], "step-00000007" in lines[1]] == [True, True]
    assert all("whole" in line for line in lines)


def test_nothing_is_cut_where_there_is_little_room(saved: Path) -> None:
    strategy = "pipeline=2 tensor=2 shard_stage=3 compress=int8 precision=bf16 schedule=zero-bubble"
    write(saved, STATE, step=13, strategy=strategy)
    _, said = inspect(saved, columns=80)
    lines = [line for line in said.splitlines() if "│ step-" in line]
    assert f"strategy of step-00000013: {strategy}" in said.splitlines()
    assert "…" not in said
    assert all(re.search(r"step-000000\d\d .* \d{4}-\d\d-\d\d \d\d:\d\d:\d\d .*whole", line) for line in lines)


def test_where_a_loader_was_is_shown(saved: Path) -> None:
    loaders = {"loader": {"epoch": 3, "samples": 48, "seed": 0, "dataset": 96}, "loader2": {"epoch": 1, "samples": 7}}
    write(saved, {**STATE, **loaders}, step=14)
    _, said = inspect(saved / "step-00000014")
    assert re.search(r"loader +\S epoch 3, 48 of 96 samples trained", said)
    assert re.search(r"loader2 +\S epoch 1, 7 samples trained", said)


def test_files_that_are_no_part_of_a_checkpoint_are_mentioned(saved: Path) -> None:
    (saved / "step-00000012" / "notes.txt").write_text("mine")
    for path in (saved, saved / "step-00000012"):
        status, said = inspect(path)
        assert status == 0
        assert f"{saved / 'step-00000012'} also holds what is no part of the checkpoint: notes.txt" in said
        assert "step-00000007 also" not in said


def test_damage_is_named_and_told_by_the_status(saved: Path) -> None:
    file = saved / "step-00000012" / "rank0.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    for path in (saved, saved / "step-00000012"):
        status, said = inspect(path)
        assert status == 1
        assert f"{file} is damaged" in said
    assert "damaged" in next(line for line in inspect(saved)[1].splitlines() if "step-00000012" in line)
    (saved / "step-00000012" / "manifest.json").write_text("{")
    assert inspect(saved)[0] == 1
    status, said = inspect(saved / "nothing")
    assert status == 1
    assert f"no checkpoint at {saved / 'nothing'}" in said
