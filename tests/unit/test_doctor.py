"""`argosy doctor` tells what the machine offers, what was measured and chosen, and what is missing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from argosy import _native
from argosy.cli import machine, trial
from argosy.cli.main import app
from argosy.comm.schedule import Collective
from argosy.comm.select import Choice, links_event
from argosy.comm.topology import Link, Topology
from argosy.observe.events import EventLog
from argosy.observe.folder import events_file

TWO_HOSTS = Topology.uniform(4, 2, Link(2e-6, 4 * 2**30), Link(50e-6, 119 * 2**20), 8 * 2**30)
RING = Choice("ring", 0.012, (("tree", 0.5), ("hierarchical", 0.02)))


def told(*words: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["doctor", *words], env={"COLUMNS": "140"})
    assert done.exit_code == status, done.output
    return re.sub(r"[ │┃]+", " ", done.output)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a trial finds, without one."""
    one_host = Topology.uniform(2, 2, Link(2e-6, 4 * 2**30))
    direct = Choice("direct", 0.0005, (("ring", 0.001),)).event(Collective.ALL_REDUCE, 1 << 20)
    result = {"links": links_event(one_host), "sizes": [direct | {"measured_seconds": 0.00061}]}
    monkeypatch.setattr(trial, "run", lambda workers: result)
    return result


def test_the_machine_is_described(found: dict[str, Any]) -> None:
    shown = told()
    assert f" torch {torch.__version__.partition('+')[0]}" in shown
    assert f" instructions {', '.join(_native.instruction_sets())}" in shown
    assert " shared memory usable (memfd) " in shown
    assert re.search(r"cores \d+", shown)
    assert re.search(r"network lo 127\.0\.0\.1", shown)


def test_links_and_choices_are_shown_as_measured(found: dict[str, Any]) -> None:
    shown = told("--workers", "2")
    assert "links of 2 workers on 1 host, as measured" in shown
    assert " inside a host, messages 2 us 4 GiB/s " in shown
    assert "between hosts" not in shown
    assert " all_reduce 1 MiB direct 500 us 610 us all on one host; ring would take 1 ms " in shown


def test_one_worker_has_nothing_to_measure(found: dict[str, Any]) -> None:
    assert "one worker has nobody to talk to" in told("-n", "1")


def test_a_trial_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(workers: int) -> dict[str, Any]:
        raise trial.TrialError("worker 1 ended with status -9: [no] word")

    monkeypatch.setattr(trial, "run", fail)
    assert "the measurement failed: worker 1 ended with status -9: [no] word" in told(status=1)


def test_the_events_of_a_run_are_shown(tmp_path: Path) -> None:
    log = EventLog(events_file(tmp_path, 0), 0)
    log.emit("start")
    log.emit("links", **links_event(TWO_HOSTS))
    log.emit("algorithm", **RING.event(Collective.ALL_REDUCE, 1 << 20))
    forced = Choice("tree", 0.5, (("ring", 0.012),), forced=True)
    log.emit("algorithm", **forced.event(Collective.ALL_REDUCE, 1 << 26))
    log.close()
    with events_file(tmp_path, 0).open("a") as file:
        file.write('{"event": "algorithm", "cut')  # the worker was killed while it wrote
    shown = told("--events", str(tmp_path))
    assert "links of 4 workers on 2 hosts, as measured" in shown
    assert " inside a host, messages 2 us 4 GiB/s " in shown
    assert " between hosts, messages 50 us 119 MiB/s " in shown
    assert " reduction by one worker 8 GiB/s " in shown
    assert " all_reduce 1 MiB ring 12 ms hierarchical would take 20 ms " in shown
    assert " all_reduce 64 MiB tree 500 ms asked for; ring would take 12 ms " in shown
    assert "this machine" not in shown


def test_a_run_without_such_events_is_told(tmp_path: Path) -> None:
    events_file(tmp_path, 0).write_text(json.dumps({"event": "start"}) + "\n")
    assert "has no record of links" in told("--events", str(tmp_path))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workers", "0"], "--workers 0: expected 1 to 64"),
        (["--workers", "1000"], "--workers 1000: expected 1 to 64"),
        (["--events", "nowhere"], "--events nowhere: there are no events of a run"),
    ],
)
def test_a_mistake_is_told(words: list[str], said: str) -> None:
    assert said in re.sub(r"\s+", " ", told(*words, status=2))


def test_what_is_amiss_comes_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(name: str, flags: int) -> int:
        raise OSError(1, "Operation not permitted")

    assert machine.files(1 << 20, 1 << 20).trouble == ""
    assert "ulimit -n 4096" in machine.files(1024, 4096).trouble
    assert machine.shared_memory().trouble == ""
    monkeypatch.setattr(machine.os, "memfd_create", forbidden)
    assert "Operation not permitted" in machine.shared_memory().trouble
    monkeypatch.setattr(machine.socket, "if_nameindex", lambda: [(1, "lo")])
    assert [fact.name for fact in machine.interfaces() if fact.trouble] == ["network"]
