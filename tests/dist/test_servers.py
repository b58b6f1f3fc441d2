"""`argosy run --servers`: servers let workers in and nobody else, end with the run, and are named if they fail."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from launching import FORKED, alive, finish, run, running, succeed, wait_for

SCRIPT = Path(__file__).parent / "scripts" / "served.py"


def job(folder: Path, how: str, *options: str, workers: int = 2, servers: int = 2) -> list[str | Path]:
    command = [*FORKED, "run", "--workers", str(workers), "--servers", str(servers), "--run-folder", folder / "run"]
    return [*command, *options, SCRIPT, how, folder]


def seen(folder: Path, rank: int) -> dict[str, object]:
    return json.loads((folder / f"rank{rank}.json").read_text())


def events(folder: Path, server: int) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "run" / f"server{server}.events.jsonl").read_text().splitlines()]


def server_pid(folder: Path, server: int) -> int:
    pid = events(folder, server)[0]["pid"]
    assert isinstance(pid, int)
    return pid


def test_workers_take_samples_by_lease_and_servers_end_with_them(tmp_path: Path) -> None:
    done = succeed(job(tmp_path, "train", "--strategy", "ps=async lease_samples=8"))
    assert "argosy: 2 workers, " in done.err
    assert " each, and 2 servers; logs and events in " in done.err
    assert [seen(tmp_path, rank)["loader"] for rank in range(2)] == ["LeasedLoader"] * 2
    assert sorted(sample for rank in range(2) for sample in seen(tmp_path, rank)["samples"]) == list(range(50))
    for server in range(2):
        assert (tmp_path / "run" / f"server{server}.log").read_text() == ""
        assert [event["event"] for event in events(tmp_path, server)] == ["start", "end"]
        assert not alive(server_pid(tmp_path, server))
    # Before that, each worker has knocked at a server with a wrong secret.
    for rank in range(2):
        told = seen(tmp_path, rank)["refused"]
        assert isinstance(told, str)
        assert told.startswith("rank 0 and server 0 on ")
        assert "have different secrets (the server does not know this secret)" in told
    assert events(tmp_path, 0)[-1]["strangers"] == 2
    assert "different" not in done.err


def test_samples_are_shared_where_steps_are_common(tmp_path: Path) -> None:
    succeed(job(tmp_path, "train", "--strategy", "ps=sync", servers=1))
    assert [seen(tmp_path, rank)["loader"] for rank in range(2)] == ["Loader"] * 2


def test_a_killed_server_ends_the_run_and_everybody_names_it(tmp_path: Path) -> None:
    with running(job(tmp_path, "wait", "--strategy", "ps=async")) as launcher:
        wait_for(lambda: len(list(tmp_path.glob("*.waits"))) == 2, 60, "workers wait")
        victim, other = server_pid(tmp_path, 1), server_pid(tmp_path, 0)
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        done = finish(launcher, deadline_seconds=30)
        assert time.monotonic() - began < 5
    assert done.status == 137
    told = [line for line in done.err.splitlines() if line.startswith("argosy:")]
    assert told[-3].startswith("argosy: server 1 failed: was killed by SIGKILL")
    assert told[-3].endswith("server1.log")
    assert told[-2:] == [f"argosy: rank {rank} stopped because server 1 failed" for rank in range(2)]
    assert "PsError" not in done.err  # what the workers have noticed is in their logs
    for rank in range(2):
        error = tmp_path / f"{rank}.error"  # unless the launcher was quicker
        assert not error.exists() or "server 1" in error.read_text()
    assert not alive(other)
    assert events(tmp_path, 0)[-1]["event"] == "end"


def test_servers_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    with running(job(tmp_path, "wait", "--strategy", "ps=async", workers=1)) as launcher:
        wait_for(lambda: (tmp_path / "0.waits").exists(), 60, "the worker waits")
        servers = [server_pid(tmp_path, server) for server in range(2)]
        assert all(alive(pid) for pid in servers)
        launcher.kill()
        wait_for(lambda: not any(alive(pid) for pid in servers), 10, "the servers end")


def test_an_interrupted_run_ends_its_servers(tmp_path: Path) -> None:
    with running(job(tmp_path, "wait", "--strategy", "ps=async", servers=1)) as launcher:
        wait_for(lambda: len(list(tmp_path.glob("*.waits"))) == 2, 60, "workers wait")
        launcher.send_signal(signal.SIGINT)
        done = finish(launcher, deadline_seconds=30)
    assert done.status == 130
    assert "server 0 failed" not in done.err
    assert not alive(server_pid(tmp_path, 0))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--servers", "2"], "ps=none: nothing would use the 2 of --servers"),
        (["--strategy", "ps=async"], "ps=async: 2 workers meet at servers"),
        (["--servers", "-1"], "--servers -1: a job has 0 servers or more"),
        (["--servers", "1", "--strategy", "ps=sync aggregate=3"], "aggregate=3: .*1 to 2"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_starts(tmp_path: Path, options: list[str], said: str) -> None:
    done = run(
        [*FORKED, "run", "--workers", "2", "--run-folder", tmp_path / "run", *options, SCRIPT, "train", tmp_path]
    )
    assert done.status == 2
    assert done.err.startswith("argosy: error: ")
    assert re.search(said, done.err)
    assert not (tmp_path / "run").exists()
