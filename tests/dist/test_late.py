"""`ps=sync aggregate=k`: a worker that is late goes on with the step that is open, and what was dropped is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import FORKED, succeed

SCRIPT = Path(__file__).parent / "scripts" / "late.py"
WORKERS, STEPS = 3, 80


@pytest.mark.parametrize("servers", [1, 2])
def test_a_worker_that_was_late_takes_part_again(tmp_path: Path, servers: int) -> None:
    sizes = ["--workers", str(WORKERS), "--servers", str(servers), "--threads", "1"]
    done = succeed([*FORKED, "run", *sizes, "--strategy", "ps=sync aggregate=2", SCRIPT, tmp_path])
    told = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(WORKERS)]
    applied, sent = told[0]["applied"], [set(each["sent"]) for each in told]
    for each in told:
        assert len(set(each["sent"])) == len(each["sent"])
        assert each["steps"] == STEPS  # made, or passed over
        assert each["evaluated"] == 10  # a loop without steps leaves nothing out
        assert each["scale"] == told[0]["scale"]
    for server in told[0]["stats"]:
        assert server["version"] == STEPS
        # Each worker's gradients are of as many steps as it was given batches for, and two of a step count.
        assert server["late_dropped"] == sum(map(len, sent)) - 2 * STEPS == sum(server["late_by_client"])
    by_rank = [{step for step in range(STEPS) if applied[step][rank]} for rank in range(WORKERS)]
    if servers == 1:  # with more, each has its own two of a step, and an id is on one of them
        assert all(sum(who) == 2 for who in applied)
        late = told[0]["stats"][0]["late_by_client"]
        assert f"argosy: ps: {sum(late)} gradients came late and were dropped (" in done.err
        assert f"rank 2: {late[2]}" in done.err
        assert [len(sent[rank]) - len(by_rank[rank]) for rank in range(WORKERS)] == late
    assert all(by_rank[rank] <= sent[rank] for rank in range(WORKERS))
    assert STEPS - len(sent[2]) >= 4  # while it slept, twice, the others made steps that it then passed over
    first, second = by_rank[2] & set(range(36)), by_rank[2] - set(range(40))
    assert [step for step in first if step > min(sent[2] - by_rank[2])]  # after it was late it is in time again
    assert second  # and so it is in the next epoch, the beginning of which it slept through
