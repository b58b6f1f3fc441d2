"""`ps=ssp:s`: the events of a run show that nobody began a step more than s steps ahead of a worker in training."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from pathlib import Path
from typing import Any

import pytest
from launching import FORKED, Finished, succeed

SCRIPT = Path(__file__).parent / "scripts" / "bounded.py"
WORKERS = 3
Events = list[dict[str, Any]]


def trained(folder: Path, ps: str, servers: int = 1) -> tuple[Finished, list[Events]]:
    sizes = ["--workers", str(WORKERS), "--servers", str(servers), "--threads", "1"]
    done = succeed([*FORKED, "run", *sizes, "--strategy", f"ps={ps}", "--run-folder", folder, SCRIPT])
    files = [folder / f"rank{rank}.events.jsonl" for rank in range(WORKERS)]
    return done, [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def distances(log: list[Events]) -> list[int]:
    """For each beginning of a step, and each other worker in training: how many steps that one had less.

    A worker has done a step when it has `pushed`, and begins the next one at the time of its `step` event; see [Note:
    who was where]. One that rests has no samples, and is not in training until it has pushed again.
    """
    found = []
    pushes = [[event["pushed"] for event in events if event["event"] == "step"] for events in log]
    rests = [[event["time"] for event in events if event["event"] == "rest"] for events in log]
    for rank, events in enumerate(log):
        begins = [event["time"] for event in events if event["event"] == "step"]
        for other in {*range(WORKERS)} - {rank}:
            for step, time in enumerate(begins, start=1):
                done = bisect_right(pushes[other], time)
                last_rest = max((rest for rest in rests[other] if rest <= time), default=0.0)
                if last_rest <= (pushes[other][done - 1] if done else 0.0):
                    found.append(step - done)
    return found


@pytest.mark.parametrize(("bound", "servers"), [(0, 1), (1, 2), (2, 1)])
def test_nobody_is_further_ahead_than_the_bound(tmp_path: Path, bound: int, servers: int) -> None:
    done, log = trained(tmp_path, f"ssp:{bound}", servers)
    steps = [sum(event["event"] == "step" for event in events) for events in log]
    assert sum(steps) == 240
    assert max(distances(log)) == bound  # never more; and others are so much faster than rank 2 that they come to it
    assert re.search(r"argosy: ps: gradients were \d steps? old in the median, \d+ at most", done.err)


def test_without_a_bound_the_same_events_show_more(tmp_path: Path) -> None:
    done, log = trained(tmp_path, "async")
    assert max(distances(log)) > 10
    median, most, pushes = map(int, done.out.split("] ")[-1].split())
    assert pushes == 2 * 240  # of the table, and of the dense parameters: one vector
    told = next(event for event in reversed(log[0]) if event["event"] == "staleness")
    assert (told["median"], told["most"]) == (median, most)
    assert f"argosy: ps: gradients were {median} step" in done.err
    assert f" old in the median, {most} at most" in done.err
