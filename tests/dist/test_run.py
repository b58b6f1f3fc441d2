"""`argosy run`: what workers see, what is shown, what is kept, and what is refused before anything starts."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest
from launching import ARGOSY, FORKED, run, succeed

SCRIPTS = Path(__file__).parent / "scripts"
SECRET = "5e" * 32


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A job of three workers that tell what they see."""
    folder = tmp_path_factory.mktemp("job")
    command = [
        *ARGOSY,
        "run",
        "--workers",
        "3",
        "--run-folder",
        folder / "run",
        SCRIPTS / "tell.py",
        folder,
        "--flag",
        "7",
    ]
    done = succeed(command, ARGOSY_SECRET=SECRET)
    return folder, done.out, done.err


def seen(folder: Path, rank: int) -> dict[str, object]:
    return json.loads((folder / f"rank{rank}.json").read_text())


def test_workers_know_their_place(job: tuple[Path, str, str]) -> None:
    ranks = [seen(job[0], rank) for rank in range(3)]
    assert [rank["rank"] for rank in ranks] == [0, 1, 2]
    assert {rank["world"] for rank in ranks} == {3}
    assert [rank["is_first"] for rank in ranks] == [True, False, False]


def test_means_are_the_same_everywhere(job: tuple[Path, str, str]) -> None:
    for rank in range(3):
        assert seen(job[0], rank)["mean"] == 1.0
        assert seen(job[0], rank)["weighted"] == pytest.approx([1.0, 5 / 3])


def test_the_script_runs_as_python_would_run_it(job: tuple[Path, str, str]) -> None:
    view = seen(job[0], 1)
    assert view["arguments"] == [str(job[0]), "--flag", "7"]
    assert view["path"] == str(SCRIPTS)
    assert view["name"] == "__main__"


def test_cores_are_divided_among_workers(job: tuple[Path, str, str]) -> None:
    assert seen(job[0], 0)["threads"] == max(1, len(os.sched_getaffinity(0)) // 3)


def test_lines_carry_their_rank_and_streams_stay_apart(job: tuple[Path, str, str]) -> None:
    _, out, err = job
    for rank in range(3):
        assert f"[{rank}] out {rank}\n" in out
        assert f"[{rank}] err {rank}\n" in err
    assert out.count("only the first") == 1
    assert "\x1b" not in out + err


def test_each_rank_has_a_log_and_events(job: tuple[Path, str, str]) -> None:
    for rank in range(3):
        log = (job[0] / "run" / f"rank{rank}.log").read_text()
        assert f"out {rank}\n" in log
        assert f"err {rank}\n" in log
        lines = (job[0] / "run" / f"rank{rank}.events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        names = [event["event"] for event in events]
        assert [name for name in names if name != "algorithm"] == ["start", "links", "warning", "end"]
        assert "algorithm" in names
        assert events[0]["world"] == 3
        assert events[names.index("warning")]["message"] == "mind the gap"
        assert events[-1]["status"] == "done"
        assert all(event["rank"] == rank for event in events)


def test_the_secret_is_in_no_command_line_and_no_file(job: tuple[Path, str, str]) -> None:
    folder, out, err = job
    assert not any(seen(folder, rank)["secret in a command line"] for rank in range(3))
    files = [file.read_text() for file in folder.rglob("*") if file.is_file()]
    assert len(files) == 9
    assert not any(SECRET in text for text in [out, err, *files])


def test_workers_of_one_host_listen_on_loopback_only(job: tuple[Path, str, str]) -> None:
    assert seen(job[0], 0)["interface"] == "lo"


def test_events_tell_every_step(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "train.py"
    done = succeed([*FORKED, "run", "-n", "2", "--run-folder", "run", "--strategy", "batch=global", script])
    events = [json.loads(line) for line in Path("run/rank1.events.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert sum(step["samples"] for step in steps) == 5 * 1000
    assert all(step["samples_per_second"] > 0 for step in steps)
    assert re.search(r"epoch 5 step 32/32 .*samples/s +ETA 0:00", done.err)
    assert "global batch 32 = 16 per worker x 2 data (batch=global)" in done.out
    assert done.out.count("global batch") == 1


def test_a_terminal_gets_colours_and_a_live_line(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "digits.py"
    master, slave = pty.openpty()
    command = [*ARGOSY, "run", "-n", "2", "--run-folder", "run", str(script), "--epochs", "3"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        shown = b""
        try:
            while chunk := os.read(master, 65536):
                shown += chunk
        except OSError:  # the terminal's other side is closed
            pass
        assert process.wait(timeout=60) == 0
    os.close(master)
    text = shown.decode()
    assert re.search(r"\x1b\[36m\[0\]\x1b\[0m", text)
    assert re.search(r"epoch \d.*loss \d\.\d{4}.*samples/s.*ETA \d:\d\d", re.sub(r"\x1b\[[0-9;]*m", "", text))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--strategy", "data=3"], ["data=3", "3 workers", "the job has 2"]),
        (["--strategy", "dta=2"], ["dta", "did you mean 'data'"]),
        (["--strategy", "batch=all"], ["batch=all", "per-worker or global"]),
        (["--strategy", "missing.toml"], ["missing.toml", "cannot be read"]),
        (["--workers", "0"], ["--workers 0"]),
        (["--threads", "0"], ["--threads 0"]),
        (["--nodes", "2", "--coordinator", "127.0.0.1:1"], ["secret"]),
        (["--nodes", "2"], ["--coordinator"]),
        (["--nodes", "2", "--node-rank", "2", "--coordinator", "127.0.0.1:1"], ["--node-rank 2"]),
        (["--coordinator", "nowhere"], ["nowhere", "HOST:PORT"]),
    ],
)
def test_a_mistake_is_told_before_anything_starts(tmp_path: Path, options: list[str], said: list[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text("open('started', 'w')")
    done = run([*ARGOSY, "run", "--workers", "2", *options, script], deadline_seconds=20)
    assert done.status == 2
    assert all(words in done.err for words in said), done.err
    assert "Traceback" not in done.err
    assert not Path("started").exists()
    assert not Path("runs").exists()


def test_a_missing_script_is_told() -> None:
    done = run([*ARGOSY, "run", "nothing.py"], deadline_seconds=20)
    assert done.status == 2
    assert "nothing.py" in done.err


def test_a_strategy_in_the_script_may_not_contradict_the_command_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import argosy; argosy.init('batch=global')")
    done = run([*FORKED, "run", "--strategy", "seed=3", script])
    assert done.status == 1
    assert "the command line says this and the script says 'batch=global'" in done.err


def test_a_process_that_imports_the_script_does_not_join_the_job(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import argosy, torch\nfrom torch.utils.data import DataLoader\nargosy.init()\n"
        "list(DataLoader(torch.arange(4), num_workers=1, multiprocessing_context='spawn'))\n"
    )
    done = run([*ARGOSY, "run", script])
    assert done.status == 1
    assert "put what the script does, argosy.init() too, under `if __name__ == '__main__':`" in done.err
    assert "Socket operation" not in done.err
