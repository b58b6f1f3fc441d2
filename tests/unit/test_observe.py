"""What is seen of a run: events on disk, progress on the screen, the way from a worker to its launcher."""

import io
import json
import math
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from argosy.observe import channel, folder
from argosy.observe.channel import MAX_MESSAGE_BYTES, Channel
from argosy.observe.events import Event, EventLog
from argosy.observe.meter import Meter
from argosy.observe.progress import LiveProgress, PlainProgress, clock_time, progress_on
from argosy.observe.warned import Warned


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run" / "rank0.events.jsonl"


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def events_in(file: Path) -> list[Event]:
    return [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]


# Events.


NUMBERS = st.floats() | st.integers() | st.none() | st.text()
FIELDS = st.dictionaries(
    st.sampled_from(["loss", "path", "parts"]),
    st.recursive(NUMBERS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5),
)


@settings(derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=FIELDS)
@example(fields={"loss": math.nan, "parts": [math.inf, {"scale": -math.inf}], "path": "two\nlines"})
def test_every_event_is_one_line_of_json(file: Path, fields: dict[str, Any]) -> None:
    file.unlink(missing_ok=True)
    log = EventLog(file, rank=3, clock=Clock(1.5))
    log.emit("first", **fields)
    log.emit("second")
    log.close()
    first, second = events_in(file)
    assert second == {"time": 1.5, "event": "second", "rank": 3}
    assert first.keys() == {"time", "event", "rank", *fields}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_lacks_can_be_read_back(file: Path, value: float) -> None:
    EventLog(file, rank=0).emit("step", loss=value)
    assert repr(float(events_in(file)[0]["loss"])) == repr(value)


def test_an_event_is_on_disk_as_soon_as_it_is_told(file: Path) -> None:
    log = EventLog(file, rank=0)
    for number in range(3):
        log.emit("step", step=number)
        assert [event["step"] for event in events_in(file)] == list(range(number + 1))


def test_events_are_added_to_those_of_an_earlier_run(file: Path) -> None:
    for name in ("earlier", "later"):
        log = EventLog(file, rank=0)
        log.emit(name)
        log.close()
    assert [event["event"] for event in events_in(file)] == ["earlier", "later"]


def test_a_listener_hears_what_is_written(file: Path) -> None:
    heard: list[Event] = []
    log = EventLog(file, rank=0, listener=heard.append)
    log.emit("step", loss=math.nan, path="a\nb")
    assert heard == events_in(file)


def test_after_closing_nobody_is_told(file: Path) -> None:
    heard: list[Event] = []
    log = EventLog(file, rank=0, listener=heard.append)
    log.close()
    log.close()
    log.emit("step")
    assert (heard, events_in(file)) == ([], [])


def test_the_meter_counts_and_times_steps(file: Path) -> None:
    clock = Clock(100.0)
    meter = Meter(EventLog(file, rank=0), clock)
    clock.now = 102.0
    meter.step(epoch=0, batch=0, batches=2, samples=32, loss=0.5)
    clock.now = 102.5
    meter.step(epoch=0, batch=1, batches=2, samples=8, loss=None)
    meter.step(epoch=1, batch=0, batches=2, samples=8, loss=math.nan)
    clock.now = 104.0
    meter.end("done")
    first, second, third, end = events_in(file)
    assert (first["step"], first["seconds"], first["samples_per_second"], first["loss"]) == (1, 2.0, 16.0, 0.5)
    assert (second["step"], second["seconds"], second["samples_per_second"]) == (2, 0.5, 16.0)
    assert "loss" not in second
    assert (third["seconds"], third["samples_per_second"], third["loss"]) == (0.0, None, "nan")
    assert (end["status"], end["steps"], end["samples"], end["seconds"]) == ("done", 3, 48, 4.0)


# Warnings.


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The warnings that are shown in the usual way."""
    seen: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", lambda message, *_: seen.append(str(message)))
        yield seen


def test_a_warning_is_shown_as_before_and_kept(file: Path, shown: list[str]) -> None:
    warned = Warned(EventLog(file, rank=0))
    warnings.warn("mind the gap", DeprecationWarning, stacklevel=1)
    warned.close()
    warnings.warn("later", stacklevel=1)
    (event,) = events_in(file)
    assert (event["event"], event["message"], event["category"]) == ("warning", "mind the gap", "DeprecationWarning")
    assert event["file"] == __file__
    assert shown == ["mind the gap", "later"]


def test_closing_leaves_what_others_have_changed_since(file: Path, shown: list[str]) -> None:
    warned = Warned(EventLog(file, rank=0))
    theirs: list[str] = []
    warnings.showwarning = lambda message, *_: theirs.append(str(message))
    warned.close()
    warnings.warn("for them", stacklevel=1)
    assert (theirs, shown) == (["for them"], [])


# The run's folder.


def test_two_runs_never_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "20300101-120000")
    start, made = threading.Barrier(8), []

    def run() -> None:
        start.wait()
        made.append(folder.new_run_folder("some/where/train.py", tmp_path / "runs"))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 8
    assert all(path.is_dir() for path in made)
    assert all(path.name.startswith("train-20300101-120000") for path in made)


def test_a_run_without_a_script_has_a_folder_too(tmp_path: Path) -> None:
    assert folder.new_run_folder("", tmp_path).name.startswith("run-")


def test_each_rank_has_files_of_its_own(tmp_path: Path) -> None:
    files = [make(tmp_path, rank) for make in (folder.events_file, folder.log_file) for rank in range(3)]
    assert len(set(files)) == 6
    assert all(path.parent == tmp_path for path in files)


# Progress.


def step(batch: int, batches: int = 10, **fields: Any) -> Event:
    event = {"event": "step", "epoch": 0, "batch": batch, "batches": batches, "samples": 32}
    return {**event, "samples_per_second": 64.0, "loss": 0.25, **fields}


class Plain:
    """Plain progress, and the time and the screen around it."""

    def __init__(self) -> None:
        self.clock, self.screen = Clock(), io.StringIO()
        self.progress = PlainProgress(self.screen, interval_seconds=5.0, clock=self.clock)

    def show(self, seconds: float, event: Event) -> list[str]:
        """The lines that an event adds after some time."""
        self.clock.now += seconds
        return self.added(lambda: self.progress.show(event))

    def added(self, work: Callable[[], None]) -> list[str]:
        before = len(self.screen.getvalue())
        work()
        return self.screen.getvalue()[before:].splitlines()


def test_plain_progress_tells_loss_speed_and_time_left() -> None:
    (line,) = Plain().show(5.0, step(batch=3, epoch=1))
    assert line.startswith("epoch 2 step 4/10")
    assert "loss 0.2500" in line
    assert "64 samples/s" in line
    assert "ETA 0:03" in line  # 6 batches of 32 samples, 64 in a second


def test_plain_progress_is_a_line_now_and_then() -> None:
    plain = Plain()
    lines = [plain.show(1.0, step(batch, batches=1000)) for batch in range(20)]
    assert [number + 1 for number, line in enumerate(lines) if line] == [5, 10, 15, 20]


def test_the_end_of_an_epoch_is_told_if_it_took_a_while() -> None:
    assert Plain().show(0.9, step(batch=9)) == []
    (line,) = Plain().show(1.0, step(batch=9))
    assert "step 10/10" in line
    assert "ETA 0:00" in line


def test_the_last_step_is_told_at_the_end_and_once() -> None:
    plain = Plain()
    plain.show(0.1, step(batch=0))
    plain.show(0.1, step(batch=1))
    (line,) = plain.added(plain.progress.close)
    assert "step 2/10" in line
    assert plain.added(plain.progress.close) == []


def test_progress_bears_what_is_not_known() -> None:
    unknown = step(batch=3, samples_per_second=None)
    del unknown["loss"]
    (line,) = Plain().show(5.0, unknown)
    assert line.strip() == "epoch 1 step 4/10"
    (line,) = Plain().show(5.0, step(batch=3, loss="nan"))
    assert "loss nan" in line
    assert Plain().show(5.0, {"event": "start", "rank": 0}) == []
    assert Plain().show(5.0, step(batch=3, batches=0)) == []


def test_the_speed_shown_is_smooth() -> None:
    plain = Plain()
    plain.show(1.0, step(batch=0, samples_per_second=100.0))
    (line,) = plain.show(5.0, step(batch=1, samples_per_second=1000.0))
    assert "190 samples/s" in line  # one fast step counts a tenth


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [80, 160])
def test_the_live_line_shows_loss_speed_and_time_left(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    progress = progress_on(terminal)
    assert isinstance(progress, LiveProgress)
    progress.show({"event": "start", "rank": 0})
    assert terminal.getvalue() == "", "nothing is shown before the first step"
    progress.show(step(1234, 20000, epoch=11, samples=4096, samples_per_second=123456.0, loss=2.34567))
    progress.close()
    for words in ("epoch 12", "1235/20000", "loss 2.3457", "123,456 samples/s", "ETA 10:23"):
        assert words in terminal.getvalue()


def test_the_kind_of_progress_suits_the_stream() -> None:
    assert isinstance(progress_on(io.StringIO()), PlainProgress)
    assert isinstance(progress_on(Terminal()), LiveProgress)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (3599.9, "1:00:00"), (90061, "25:01:01")]
)
def test_a_time_reads_as_on_a_clock(seconds: float, text: str) -> None:
    assert clock_time(seconds) == text


# From worker to launcher.


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    launcher, worker = channel.pair()
    launcher.setblocking(False)
    with launcher, worker:
        yield launcher, worker


def received(launcher: socket.socket) -> list[Event]:
    """What the launcher reads: messages one by one, none longer than agreed."""
    messages = []
    try:
        while True:
            messages.append(json.loads(launcher.recv(MAX_MESSAGE_BYTES)))
    except BlockingIOError:
        return messages


def test_steps_are_thinned_out_and_other_events_are_not(ends: tuple[socket.socket, socket.socket]) -> None:
    launcher, worker = ends
    clock = Clock(100.0)
    sender = Channel(worker, clock, rate=10.0)
    for batch in range(41):
        clock.now = 100.0 + batch / 40
        sender.event(step(batch, batches=1000))
    assert len(received(launcher)) == pytest.approx(10, abs=1)
    for _ in range(3):
        sender.event({"event": "warning"})
        sender.event(step(batch=9, batches=10))
    assert [event["event"] for event in received(launcher)] == ["warning", "step"] * 3, "nor the last step of an epoch"


def test_events_are_dropped_and_not_waited_for(ends: tuple[socket.socket, socket.socket]) -> None:
    launcher, worker = ends
    sender = Channel(worker, time.monotonic)
    began = time.monotonic()
    for number in range(5000):
        sender.event({"event": "warning", "number": number, "text": "x" * 1000})
    assert time.monotonic() - began < 5
    kept = [event["number"] for event in received(launcher)]
    assert kept == list(range(len(kept))), "the first ones arrive, whole"
    assert 0 < len(kept) < 5000
    sender.event({"event": "warning", "number": -1})
    assert [event["number"] for event in received(launcher)] == [-1], "and then the way is free again"


def test_a_launcher_that_is_gone_does_not_matter(ends: tuple[socket.socket, socket.socket]) -> None:
    launcher, worker = ends
    launcher.close()
    sender = Channel(worker, time.monotonic)
    sender.event({"event": "warning"})
    sender.failure("ValueError: no", "Traceback", status=1)


def test_a_failure_is_told_whole(ends: tuple[socket.socket, socket.socket]) -> None:
    launcher, worker = ends
    Channel(worker, time.monotonic).failure("ValueError: no", "Traceback\n  a\n", status=3, secondary=True)
    assert received(launcher) == [
        {"event": "traceback", "text": "Traceback\n  a\n"},
        {"event": "failure", "message": "ValueError: no", "status": 3, "secondary": True},
    ]


@pytest.mark.parametrize("status", [1, 255, 256, -1, 0])
def test_a_failure_is_never_told_as_success(ends: tuple[socket.socket, socket.socket], status: int) -> None:
    launcher, worker = ends
    Channel(worker, time.monotonic).failure("ValueError: no", "", status)
    assert 1 <= received(launcher)[0]["status"] <= 255, "as a shell can report it"


@pytest.mark.parametrize("letter", ["x", "\n", '"', "é", "語", "🚢", "\x1b", "\udc80"], ids=ascii)
def test_a_long_traceback_is_told_in_pieces_and_whole(ends: tuple[socket.socket, socket.socket], letter: str) -> None:
    launcher, worker = ends
    launcher.settimeout(5)
    traceback = 200_000 * letter + "ValueError: no"
    teller = threading.Thread(
        target=lambda: Channel(worker, time.monotonic).failure(200_000 * letter, traceback, status=1)
    )
    teller.start()
    events: list[Event] = []
    while not events or events[-1]["event"] != "failure":
        events.append(json.loads(launcher.recv(MAX_MESSAGE_BYTES)))
    teller.join()
    assert "".join(event["text"] for event in events[:-1]) == traceback
    assert events[-1]["message"].startswith(100 * letter)


def test_a_failure_is_worth_a_short_wait(ends: tuple[socket.socket, socket.socket]) -> None:
    launcher, worker = ends
    sender = Channel(worker, time.monotonic)
    for _ in range(2000):
        sender.event({"event": "warning", "text": "x" * 1000})
    read: list[Event] = []
    reader = threading.Timer(0.2, lambda: read.extend(received(launcher)))
    reader.start()
    sender.failure("ValueError: no", "Traceback", status=1)
    reader.join()
    assert (read + received(launcher))[-1]["event"] == "failure"
