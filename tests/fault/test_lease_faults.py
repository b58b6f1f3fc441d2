"""A worker ends in the middle of a range: the others train what it had not done, and every sample is done once."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from launching import FORKED, Finished, alive, finish, free_port, pids, run, running, wait_for

from argosy.control.secret import Secret

SCRIPT = Path(__file__).parent / "scripts" / "leased.py"
WORKERS = 3


def job(folder: Path, strategy: str, how: str, batches: int = 7) -> Finished:
    sizes = ["--workers", str(WORKERS), "--servers", "1", "--strategy", strategy]
    done = run([*FORKED, "run", *sizes, "--run-folder", folder / "run", SCRIPT, folder, how, str(batches)])
    started = pids(folder)
    assert len(started) == WORKERS
    assert not [pid for pid in started if alive(pid)]
    return done


def said(done: Finished) -> list[str]:
    """What the launcher told, but for its first line and what servers have counted."""
    told = [line.removeprefix("argosy: ") for line in done.err.splitlines() if line.startswith("argosy: ")][1:]
    return [line for line in told if not line.startswith("ps: ")]


def trained(folder: Path, rank: int) -> list[tuple[int, int]]:
    lines = (folder / f"rank{rank}.trained").read_text().splitlines()
    return [(int(epoch), int(sample)) for epoch, sample in (line.split() for line in lines)]


def test_the_others_train_what_a_killed_worker_held(tmp_path: Path) -> None:
    done = job(tmp_path, "ps=async", "kill")  # its 7th batch is the third one of a range of 4
    assert done.status == 0, done.err
    assert said(done) == ["rank 1 was lost (killed by SIGKILL); its samples go to the others"]
    for rank in (0, 2):
        first, second = json.loads((tmp_path / f"rank{rank}.json").read_text())
        for ledger in (first, second):
            assert ledger["finished"]
            assert ledger["counts"] == [[0, 200, 1]]  # every position exactly once
        assert (first["returned"], second["returned"]) == (1, 0)
        assert (tmp_path / f"rank{rank}.mean").read_text() == "2.5"  # of 1 and 4: who is lost is left out
    times = Counter(each for rank in range(WORKERS) for each in trained(tmp_path, rank))
    assert set(times) == {(epoch, sample) for epoch in range(2) for sample in range(200)}
    # What it had not told of, and only that, was trained twice: here the batch of two that it had in hand.
    twice = [each for each, count in times.items() if count > 1]
    assert sorted(twice) == sorted(trained(tmp_path, 1)[-2:])
    end = json.loads((tmp_path / "run" / "rank1.events.jsonl").read_text().splitlines()[-1])
    assert (end["event"], end["status"].startswith("was killed by SIGKILL")) == ("end", True)


@pytest.mark.parametrize(
    ("strategy", "how", "batches", "again"),
    [
        ("ps=async", "break", 7, False),  # the third batch of a range of 4
        ("ps=async", "exit", 7, False),
        ("ps=async", "kill", 7, True),  # the batch in hand, of which it could not tell any more
        ("ps=half-async:3", "break", 7, False),
    ],
)
def test_a_sample_is_applied_once_per_epoch(tmp_path: Path, strategy: str, how: str, batches: int, again: bool) -> None:
    sizes = ["--workers", str(WORKERS), "--servers", "1", "--threads", "1", "--strategy", strategy]
    script = Path(__file__).parent / "scripts" / "counted.py"
    done = run([*FORKED, "run", *sizes, "--run-folder", tmp_path / "run", script, tmp_path, how, str(batches)])
    assert done.status == 0, done.err
    times = json.loads((tmp_path / "rank0.json").read_text())
    in_hand = json.loads((tmp_path / "in_hand.json").read_text())
    assert times == [3 if again and sample in in_hand else 2 for sample in range(180)]
    assert not [pid for pid in pids(tmp_path) if alive(pid)]


def test_a_script_that_fails_still_ends_the_run(tmp_path: Path) -> None:
    done = job(tmp_path, "ps=async", "raise")
    assert done.status == 1
    told = said(done)
    assert told[0].startswith("rank 1 failed: ValueError: the cargo has shifted")
    assert told[1:] == [f"rank {rank} stopped because rank 1 failed" for rank in (0, 2)]


def test_a_run_that_loses_everybody_has_failed(tmp_path: Path) -> None:
    done = job(tmp_path, "ps=async", "kill all")
    assert done.status == 137
    told = said(done)
    assert len(told) == WORKERS
    assert {line[: len("rank 0")] for line in told} == {f"rank {rank}" for rank in range(WORKERS)}
    assert all(" was lost (killed by SIGKILL); its samples go to the others" in line for line in told[:-1])
    assert " failed: was killed by SIGKILL" in told[-1]


def test_a_loss_on_one_node_is_borne_by_all(tmp_path: Path) -> None:
    secret, port = Secret.new().hex(), free_port()
    nodes = []
    with ExitStack() as stack:
        for node, workers in enumerate((1, 2)):
            sizes = ["--workers", str(workers), "--servers", "1", "--nodes", "2", "--node-rank", str(node)]
            command = [*FORKED, "run", *sizes, "--coordinator", f"127.0.0.1:{port}", "--strategy", "ps=async"]
            script = ["--run-folder", tmp_path / "run", SCRIPT, tmp_path, "kill", "7"]
            nodes.append(stack.enter_context(running([*command, *script], ARGOSY_SECRET=secret)))
        first, second = (finish(node, deadline_seconds=90) for node in nodes)
    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert "rank 1 was lost (killed by SIGKILL); its samples go to the others" in second.err
    assert "lost" not in first.err
    for ledger in json.loads((tmp_path / "rank0.json").read_text()):
        assert ledger["counts"] == [[0, 200, 1]]
    assert {file.name for file in (tmp_path / "run").glob("server*.log")} == {"server0.log", "server1.log"}
    assert not [pid for pid in pids(tmp_path) if alive(pid)]


@pytest.mark.parametrize(
    ("strategy", "status", "tells"),
    [
        (
            "ps=sync aggregate=2",
            0,
            "rank 1 was lost (killed by SIGKILL); its gradients are missing from now on, and a step waits for 2 "
            "(aggregate)",
        ),
        ("ps=sync", 137, "rank 1 failed: was killed by SIGKILL"),
        ("ps=async dense=allreduce", 137, "rank 1 failed: was killed by SIGKILL"),
    ],
)
def test_where_steps_are_common_enough_must_live(tmp_path: Path, strategy: str, status: int, tells: str) -> None:
    done = job(tmp_path, strategy, "kill")
    assert done.status == status, done.err
    assert said(done)[0].startswith(tells)
    if status == 0:
        assert [(tmp_path / f"rank{rank}.mean").read_text() for rank in (0, 2)] == ["2.5"] * 2


def test_the_click_example_ends_with_its_result_when_a_worker_is_killed(tmp_path: Path) -> None:
    sizes = ["--workers", str(WORKERS), "--servers", "1", "--threads", "1", "--strategy", "ps=async"]
    example = Path(__file__).parents[2] / "examples" / "ctr.py"
    command = [*FORKED, "run", *sizes, "--run-folder", tmp_path, example, "--rows", "100000"]
    log = tmp_path / "rank1.events.jsonl"

    def steps() -> int:
        return log.read_text().count('"event": "step"') if log.exists() else 0

    with running(command) as process:
        wait_for(lambda: steps() > 5, 60, "rank 1 trains")
        os.kill(json.loads(log.read_text().splitlines()[0])["pid"], signal.SIGKILL)
        done = finish(process, deadline_seconds=60)
    assert done.status == 0, done.err
    assert said(done)[0] == "rank 1 was lost (killed by SIGKILL); its samples go to the others"
    assert "test AUC" in done.out
    assert json.loads((tmp_path / "result.json").read_text())["auc"] > 0.75
