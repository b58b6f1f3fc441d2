"""Whatever ends a run, it ends at once, says why, and leaves nothing running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from launching import ARGOSY, FORKED, alive, finish, pids, running, wait_for

SCRIPT = Path(__file__).parent / "scripts" / "faulty.py"
LIMIT_SECONDS = 5.0


def job(tmp_path: Path, *arguments: str, workers: int = 3, command: Sequence[str] = FORKED) -> list[str | Path]:
    return [*command, "run", "--workers", str(workers), "--run-folder", tmp_path / "run", SCRIPT, tmp_path, *arguments]


def seconds_since(mark: Path) -> float:
    return time.time() - mark.stat().st_mtime


def wait_until_all_train(tmp_path: Path, workers: int = 3) -> None:
    wait_for(lambda: len(list(tmp_path.glob("*.trains"))) == workers, 60, "all workers train")


def assert_nothing_left(tmp_path: Path, workers: int = 3) -> None:
    started = pids(tmp_path)
    assert len(started) == 2 * workers  # each worker and its own child
    assert not [pid for pid in started if alive(pid)]


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("raise", 1, "ValueError: the cargo has shifted"),
        ("exit", 3, "exited with status 3"),
        ("sys.exit", 4, "sys.exit(4)"),
        ("abort", 134, "was killed by SIGABRT"),
        ("kill", 137, "was killed by SIGKILL"),
    ],
)
def test_a_failing_rank_ends_the_run(tmp_path: Path, how: str, status: int, said: str) -> None:
    with running(job(tmp_path, how)) as launcher:
        done = finish(launcher, deadline_seconds=60)
    assert seconds_since(tmp_path / "end") < LIMIT_SECONDS
    assert done.status == status
    told = [line for line in done.err.splitlines() if line.startswith("argosy:")]
    assert told[-3].startswith("argosy: rank 1 failed: ")
    assert said in told[-3]
    assert told[-2:] == [f"argosy: rank {rank} stopped because rank 1 failed" for rank in (0, 2)]
    assert "CommError" not in done.err  # the echo on the other ranks is in their logs only
    assert_nothing_left(tmp_path)


def test_the_traceback_comes_first_and_whole(tmp_path: Path) -> None:
    with running(job(tmp_path, "raise", command=ARGOSY)) as launcher:
        lines = finish(launcher, deadline_seconds=60).err.splitlines()
    begin = lines.index("[1] Traceback (most recent call last):")
    end = lines.index("[1] ValueError: the cargo has shifted")
    shown = lines[begin : end + 1]
    assert all(line.startswith("[1] ") for line in shown)
    assert f'[1]   File "{SCRIPT}", line' in shown[1]  # it begins in the script, not in the launcher's own code
    assert "innermost" in shown[-3]
    assert lines[end + 1].startswith("argosy: rank 1 failed")
    log = (tmp_path / "run" / "rank1.log").read_text()
    assert "\n".join(line.removeprefix("[1] ") for line in shown) in log


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=lambda v: str(v)
)
def test_a_signal_to_the_launcher_ends_all_workers(tmp_path: Path, number: signal.Signals, status: int) -> None:
    with running(job(tmp_path, "never")) as launcher:
        wait_until_all_train(tmp_path)
        launcher.send_signal(number)
        done = finish(launcher, deadline_seconds=LIMIT_SECONDS)
    assert done.status == status
    assert f"{number.name} was received" in done.err
    for rank in range(3):
        events = [json.loads(line)["event"] for line in (tmp_path / "run" / f"rank{rank}.events.jsonl").open()]
        assert events.count("end") == 1, "a worker that cannot write its end has it written by the launcher"
    assert "Traceback" not in done.err
    assert_nothing_left(tmp_path)


def test_workers_that_do_not_listen_are_ended_all_the_same(tmp_path: Path) -> None:
    with running(job(tmp_path, "deaf", workers=2)) as launcher:
        wait_until_all_train(tmp_path, workers=2)
        launcher.send_signal(signal.SIGTERM)
        assert finish(launcher, deadline_seconds=LIMIT_SECONDS).status == 143
    assert_nothing_left(tmp_path, workers=2)


def test_no_worker_outlives_a_killed_launcher(tmp_path: Path) -> None:
    with running(job(tmp_path, "deaf", command=ARGOSY)) as launcher:
        wait_until_all_train(tmp_path)
        launcher.kill()
        launcher.wait(timeout=5)
        wait_for(lambda: not any(alive(pid) for pid in pids(tmp_path)), LIMIT_SECONDS, "all workers are gone")
        assert len(pids(tmp_path)) == 6


def test_a_stopped_worker_does_not_outlive_a_killed_launcher_either(tmp_path: Path) -> None:
    with running(job(tmp_path, "never")) as launcher:
        wait_until_all_train(tmp_path)
        for pid in pids(tmp_path):
            os.kill(pid, signal.SIGSTOP)
        launcher.kill()
        launcher.wait(timeout=5)
        wait_for(lambda: not any(alive(pid) for pid in pids(tmp_path)), LIMIT_SECONDS, "all workers are gone")


def test_ctrl_c_in_a_terminal_ends_the_run_once(tmp_path: Path) -> None:
    """The terminal sends SIGINT to the launcher's group; workers are in groups of their own."""
    with running(job(tmp_path, "never", workers=2, command=ARGOSY)) as launcher:
        wait_until_all_train(tmp_path, workers=2)
        os.killpg(launcher.pid, signal.SIGINT)
        assert finish(launcher, deadline_seconds=LIMIT_SECONDS).status == 130
    assert_nothing_left(tmp_path, workers=2)


def test_a_run_whose_output_is_not_read_can_be_stopped(tmp_path: Path) -> None:
    """Neither a pipe that is full nor a terminal that is stopped may keep the launcher from its signals."""
    script = tmp_path / "talk.py"
    script.write_text("open('started', 'w')\nwhile True: print(1000 * 'x')")
    with running([*ARGOSY, "run", script]) as launcher:
        wait_for((tmp_path / "started").exists, 30, "the script talks")
        time.sleep(1)
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(timeout=LIMIT_SECONDS + 3)  # the reader's last chance to read is part of it
        assert launcher.returncode == 143


def test_nohup_keeps_a_run_alive(tmp_path: Path) -> None:
    with running(["nohup", *job(tmp_path, "never", workers=2, command=ARGOSY)]) as launcher:
        wait_until_all_train(tmp_path, workers=2)
        launcher.send_signal(signal.SIGHUP)
        time.sleep(1)
        assert launcher.poll() is None
        launcher.send_signal(signal.SIGTERM)
        assert finish(launcher, deadline_seconds=LIMIT_SECONDS).status == 143
    assert_nothing_left(tmp_path, workers=2)


def test_a_signal_while_workers_start_ends_the_run(tmp_path: Path) -> None:
    with running(job(tmp_path, "never", workers=4, command=ARGOSY)) as launcher:
        wait_for((tmp_path / "run" / "rank0.log").exists, 20, "the first worker starts")
        launcher.send_signal(signal.SIGINT)
        assert finish(launcher, deadline_seconds=LIMIT_SECONDS).status == 130
    assert not [pid for pid in pids(tmp_path) if alive(pid)]


def test_output_that_nobody_reads_does_not_end_the_run(tmp_path: Path) -> None:
    script = tmp_path / "talk.py"
    script.write_text("for n in range(20000): print(n)\nopen('done', 'w')")
    launcher = subprocess.Popen([*ARGOSY, "run", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert launcher.stdout is not None
    launcher.stdout.readline()
    launcher.stdout.close()
    assert launcher.wait(timeout=30) == 0
    assert (tmp_path / "done").exists()
