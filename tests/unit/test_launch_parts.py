"""What the launcher is made of: threads, networks, failures in words, logs, and a worker's place in the job."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.control.job import Job, JobError
from argosy.control.network import interface_towards
from argosy.control.secret import Secret
from argosy.launch.failure import Failure, ended, shell_status
from argosy.launch.screen import RankLog, Screen
from argosy.launch.threads import VARIABLES, available_cores, thread_variables, threads_per_worker

# Threads.


@pytest.mark.parametrize(
    ("content", "cores"),
    [
        ("max 100000\n", 8),
        ("400000 100000\n", 4),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("9900000 100000\n", 8),
        ("what is this?", 8),
        ("", 8),
        (None, 8),
    ],
)
def test_a_container_has_its_share_of_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    limit = tmp_path / "cpu.max"
    if content is not None:
        limit.write_text(content)
    assert available_cores(limit) == cores


@settings(derandomize=True, deadline=None)
@given(workers=st.integers(1, 64), cores=st.integers(1, 256))
def test_workers_share_the_cores(workers: int, cores: int) -> None:
    threads = threads_per_worker(workers, cores)
    assert threads >= 1
    assert threads == 1 or threads * workers <= cores
    assert (threads + 1) * workers > cores, "as many as fit"


def test_threads_are_limited_unless_the_user_has_said_so() -> None:
    each = str(threads_per_worker(2, available_cores()))
    assert thread_variables(None, 2, {}) == dict.fromkeys(VARIABLES, each)
    assert thread_variables(None, 2, {"OMP_NUM_THREADS": "7"}) == {
        name: each for name in VARIABLES if name != "OMP_NUM_THREADS"
    }
    assert thread_variables(3, 2, {"OMP_NUM_THREADS": "7"}) == dict.fromkeys(VARIABLES, "3")


# Networks.


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_this_machine_is_reached_through_the_loopback(host: str) -> None:
    assert interface_towards(host, 29500) == "lo"


def test_another_machine_is_reached_through_an_interface_that_exists() -> None:
    assert interface_towards("192.0.2.1", 29500) in {None, *(name for _, name in socket.if_nameindex())}


def test_an_unreachable_machine_has_no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert interface_towards("192.0.2.1", 29500) is None


# Failures.


@settings(derandomize=True, deadline=None)
@given(failure=st.builds(Failure, what=st.text(), detail=st.text(), status=st.integers(0, 255), traceback=st.text()))
def test_launchers_tell_each_other_failures_whole(failure: Failure) -> None:
    assert Failure.from_json(failure.to_json()) == failure


def test_an_exit_status_is_told_in_words() -> None:
    assert ended(3) == "exited with status 3"
    assert ended(-signal.SIGSEGV) == "was killed by SIGSEGV"
    assert "memory" in ended(-signal.SIGKILL), "the usual reason is named"
    assert "memory" not in ended(-signal.SIGTERM)


def test_every_signal_can_be_told() -> None:
    names = {member.value: member.name for member in signal.Signals}  # most real-time signals have none
    for number in range(1, signal.NSIG):
        assert names.get(number, str(number)) in ended(-number)


def test_a_status_is_told_as_a_shell_would() -> None:
    assert [shell_status(status) for status in (0, 1, 255, -9, -15)] == [0, 1, 255, 137, 143]


# Logs.


class Log:
    """One rank's log, with what is on the screen and in the file."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._screen = Screen()
        self.rank_log, self._file, self._capsys = RankLog(self._screen, folder, rank=3), folder / "rank3.log", capsys

    def out(self, *chunks: bytes) -> list[str]:
        """The lines that some output adds to the screen, without the rank that begins them."""
        for chunk in chunks:
            self.rank_log.data("stdout", chunk)
        return self.shown()[0]

    def shown(self) -> tuple[list[str], list[str]]:
        self._screen.close(5.0)
        streams = self._capsys.readouterr()
        for line in (streams.out + streams.err).removesuffix("\n").split("\n"):
            assert not line or line.startswith("[3] ")
        out, err = ([line.removeprefix("[3] ") for line in text.split("\n")[:-1]] for text in streams)
        return out, err

    @property
    def written(self) -> bytes:
        return self._file.read_bytes()


@pytest.fixture
def log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Log]:
    log = Log(tmp_path, capsys)
    yield log
    log.rank_log.close()


def test_a_line_is_shown_when_it_is_complete(log: Log) -> None:
    assert log.out(b"epoch 1 lo") == []
    assert log.written == b"epoch 1 lo", "the file has it at once"
    assert log.out(b"ss 0.5\nepoch 2\n\nepo") == ["epoch 1 loss 0.5", "epoch 2", ""]
    log.rank_log.close()
    assert log.shown()[0] == ["epo"], "the last line needs no end"
    assert log.written == b"epoch 1 loss 0.5\nepoch 2\n\nepo"


def test_output_and_errors_do_not_mix(log: Log) -> None:
    log.rank_log.data("stdout", b"to be ")
    log.rank_log.data("stderr", b"warning: ")
    log.rank_log.data("stdout", b"or not\n")
    log.rank_log.data("stderr", b"late\n")
    assert log.shown() == (["to be or not"], ["warning: late"])


def test_only_the_last_state_of_a_progress_bar_is_shown(log: Log) -> None:
    assert log.out(b"10%\r50%", b"\r100%\n") == ["100%"]
    assert log.out(b"from windows\r\n") == ["from windows"]
    assert log.written == b"10%\r50%\r100%\nfrom windows\r\n"


def test_a_character_cut_in_two_is_shown_whole(log: Log) -> None:
    ship = "🚢\n".encode()
    assert log.out(ship[:2], ship[2:]) == ["🚢"]


def test_bytes_that_are_no_text_are_shown_as_well_as_can_be(log: Log) -> None:
    (line,) = log.out(b"ok \xff\xfe ok\n")
    assert line.startswith("ok ")
    assert line.endswith(" ok")
    assert log.written == b"ok \xff\xfe ok\n"


@pytest.mark.parametrize("letter", ["x", "é"])
@pytest.mark.parametrize("chunk_bytes", [1000, 65537])
def test_a_very_long_line_is_shown_in_pieces(log: Log, letter: str, chunk_bytes: int) -> None:
    text = 100_000 * letter
    data = text.encode()
    pieces = log.out(*(data[begin : begin + chunk_bytes] for begin in range(0, len(data), chunk_bytes)))
    assert pieces, "nobody waits for the end of such a line, nor keeps all of it"
    assert "".join([*pieces, *log.out(b"\n")]) == text
    assert log.written == data + b"\n"


def test_hidden_output_is_still_in_the_file(log: Log) -> None:
    log.out(b"seen\nhalf")
    log.rank_log.shown = False
    assert log.out(b" unseen\nunseen\nunfinished") == []
    log.rank_log.text("Traceback\n  why\n")
    log.rank_log.record("for the file\n")
    log.rank_log.close()
    assert log.shown() == ([], ["Traceback", "  why"]), "what the channel told is shown all the same"
    assert log.written == b"seen\nhalf unseen\nunseen\nunfinishedTraceback\n  why\nfor the file\n"


class Dark(Screen):
    def line(self, *_: object) -> None:
        """Show nothing."""


@pytest.mark.parametrize("write", [RankLog.text, RankLog.record])
def test_text_that_no_file_can_hold_does_not_stop_the_launcher(
    tmp_path: Path, write: Callable[[RankLog, str], None]
) -> None:
    rank_log = RankLog(Dark(), tmp_path, rank=3)
    write(rank_log, "no such file: data\udc80.csv\n")  # a name that is not valid in UTF-8, as Python holds it
    rank_log.close()
    assert (tmp_path / "rank3.log").read_bytes().startswith(b"no such file: data")


def test_a_log_goes_on_where_an_earlier_one_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in (b"first\n", b"second\n"):
        log = Log(tmp_path, capsys)
        log.out(text)
        log.rank_log.close()
        log.rank_log.close()
    assert log.written == b"first\nsecond\n"


# The job in the environment.

SECRET = Secret(bytes(range(32)))
WORKER = Job(1, 4, coordinator="10.0.0.1:29500", secret=SECRET, run_folder=Path("runs/net"), channel=5)
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "4"}
NUMBERS = ["ARGOSY_RANK", "ARGOSY_WORLD"]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    world = draw(st.integers(1, 10**6))
    return Job(
        rank=draw(st.integers(0, world - 1)),
        world=world,
        coordinator=draw(st.sampled_from(["127.0.0.1:1", "[::1]:29500", "node0:65535"])),
        secret=Secret(draw(st.binary(min_size=32, max_size=32))),
        strategy=draw(st.none() | st.sampled_from(["", "data=4 batch=global"])),
        run_folder=draw(st.none() | st.sampled_from([Path("runs/a b"), Path("/tmp/läufe"), Path()])),
        channel=draw(st.none() | st.integers(0, 1023)),
    )


@settings(derandomize=True, deadline=None)
@given(job=jobs())
def test_a_worker_finds_the_place_that_its_launcher_wrote(job: Job) -> None:
    assert Job.from_environment({"HOME": "/root", **job.environment()}) == job


def test_a_process_that_nobody_started_as_a_worker_is_a_job_of_one() -> None:
    job = Job.from_environment({"HOME": "/root", "RANKING": "3"})
    assert (job.rank, job.world) == (0, 1)
    assert not job.torchrun


def test_torchruns_variables_are_understood() -> None:
    assert Job.from_environment(TORCHRUN) == Job(3, 4, torchrun=True)


def test_other_launchers_that_set_torchs_variables_are_understood() -> None:
    environment = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500", "RANK": "1", "WORLD_SIZE": "2"}
    assert Job.from_environment(environment) == Job(1, 2, torchrun=True)


def test_our_launcher_comes_before_torchrun() -> None:
    assert Job.from_environment({**TORCHRUN, **WORKER.environment()}) == WORKER


@pytest.mark.parametrize("missing", [*NUMBERS, "ARGOSY_COORDINATOR", "ARGOSY_SECRET"])
def test_a_variable_of_ours_that_is_missing_is_named(missing: str) -> None:
    environment = WORKER.environment()
    del environment[missing]
    with pytest.raises(JobError, match=rf"{missing} is not set.*argosy run"):
        Job.from_environment(environment)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE"])
def test_a_variable_of_torchruns_that_is_missing_is_named(missing: str) -> None:
    with pytest.raises(JobError, match=rf"^{missing} is not set"):
        Job.from_environment({name: value for name, value in TORCHRUN.items() if name != missing})


@pytest.mark.parametrize("name", [*NUMBERS, "ARGOSY_CHANNEL"])
@pytest.mark.parametrize("value", ["one", "1.5"])
def test_a_variable_that_is_no_number_is_named(name: str, value: str) -> None:
    with pytest.raises(JobError, match=f"{name}={value}: "):
        Job.from_environment({**WORKER.environment(), name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("ARGOSY_RANK", "4"), ("ARGOSY_RANK", "-1"), ("ARGOSY_WORLD", "0")],
)
def test_a_place_that_the_job_does_not_have_is_refused(name: str, value: str) -> None:
    with pytest.raises(JobError, match=f"{name}={value}"):
        Job.from_environment({**WORKER.environment(), name: value})


def test_a_garbled_secret_is_refused_and_not_shown() -> None:
    garbled = SECRET.hex()[:-1]
    with pytest.raises(JobError, match="ARGOSY_SECRET") as caught:
        Job.from_environment({**WORKER.environment(), "ARGOSY_SECRET": garbled})
    assert garbled not in str(caught.value)


def test_a_job_does_not_show_its_secret() -> None:
    assert SECRET.hex() not in repr(WORKER)


# The screen.


def test_a_screen_that_nobody_reads_holds_up_nobody_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    unread = os.fdopen(write, "w")
    monkeypatch.setattr("sys.stdout", unread)
    screen = Screen()
    assert not screen.crowded
    for number in range(20_000):  # a pipe takes 64 KiB: none of that waits
        screen.line(0, f"{number} " + 100 * "x")
    assert screen.crowded
    drained: list[bytes] = []
    reader = threading.Thread(target=lambda: drained.append(os.fdopen(read, "rb").read()))
    reader.start()
    screen.close(10.0)
    assert not screen.crowded
    unread.close()
    reader.join(timeout=10)
    shown = drained[0].decode().splitlines()
    assert [line.split()[1] for line in shown] == [str(number) for number in range(20_000)]


def test_a_full_disk_does_not_hide_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "rank0.log").symlink_to("/dev/full")
    screen = Screen()
    log = RankLog(screen, tmp_path, rank=0)
    log.data("stdout", b"first\nsecond\n")
    log.text("Traceback\n")
    screen.close(5.0)
    shown = capsys.readouterr()
    assert shown.out == "[0] first\n[0] second\n"
    assert "[0] Traceback\n" in shown.err
    assert shown.err.count("cannot be written") == 1


def test_the_command_line_loads_no_torch() -> None:
    """It takes seconds to load, and a launcher on each of a hundred hosts has no use for it."""
    code = "import sys, argosy.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
