"""Real workers measure their links, choose alike, and compute the same by every algorithm; `argosy doctor` shows it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from launching import ARGOSY, finish, start, succeed

from argosy.comm.algorithms.catalogue import ALGORITHMS
from argosy.comm.schedule import Collective

SCRIPT = Path(__file__).parent / "scripts" / "choose.py"


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"], ["a", "a", "b"], ["a", "b", "b", "a"]], ids="".join)
def test_ranks_choose_alike_and_every_algorithm_sums(hosts: list[str], tmp_path: Path) -> None:
    size = len(hosts)
    words = [[sys.executable, SCRIPT, str(rank), str(size), tmp_path / "store", host] for rank, host in enumerate(hosts)]
    started = [start(command) for command in words]
    finished = [finish(process, 100) for process in started]
    for done in finished:
        assert done.status == 0, done.err
    told = [json.loads(done.out) for done in finished]
    assert all(other == told[0] for other in told)
    names = {name for name in ALGORITHMS[Collective.ALL_REDUCE]} | ({"direct"} if len({*hosts}) == 1 else set())
    assert {key.split()[0] for key in told[0]["sums"]} == names
    for key, values in told[0]["sums"].items():
        assert values == ([1.0] if "broadcast" in key else [float(sum(range(size)))]), key
    topology = told[0]["topology"]
    for link in ("inside", "between"):
        assert 0 < topology[link]["latency_seconds"] < 1
        assert 1e5 < topology[link]["bytes_per_second"] < 1e13


def test_the_doctor_measures_with_real_workers() -> None:
    done = succeed([*ARGOSY, "doctor", "--workers", "3"], COLUMNS="140")
    assert "links of 3 workers on 1 host, as measured" in done.out
    for size in ("1 KiB", "64 KiB", "1 MiB", "64 MiB"):
        assert re.search(rf"all_reduce .* {size} .* direct .* [mun]s .* [mun]s .*all on one host; \w+ would", done.out)
