"""The benchmark's own arithmetic: turns, medians, ratios, claims, and what is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from contenders.serving import Operation, measure, summary
from crew import Contender
from harness import Report, Row, claim, markdown, quantile, ratio, share, spread, versus, write
from picture import draw, style
from rounds import Entry, in_turns
from simulation import claims as simulation_claims
from simulation import compare, order

MIB = 1 << 20


def row(contender: str, *repeats: float, size: int = MIB, setting: str = "2 ranks") -> Row:
    return Row(setting, contender, size, repeats, min(repeats), max(repeats))


def point(algorithm: str, simulated: float, measured: float, hosts: int = 2, size: int = MIB) -> dict[str, object]:
    layout = {"hosts": hosts, "per_host": 1, "bytes": size}
    return {**layout, "algorithm": algorithm, "simulated": simulated, "measured": measured, "repeats": [measured]}


def test_times_are_summed_up_by_their_quantiles() -> None:
    found = summary([5.0, 1.0, 2.0, 4.0, 3.0, 100.0])
    assert (found["median"], found["p10"], found["p90"]) == (3.5, 1.0, 5.0)
    assert summary([2.0])["median"] == 2.0
    assert quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.9) == pytest.approx(4.6)
    assert spread([3.0, 1.0, 2.0]).value == 2.0


def test_an_operation_runs_for_its_warmup_and_its_iterations() -> None:
    ran: list[str] = []
    found = measure(Operation(lambda: ran.append("run"), lambda: ran.append("prepare")), warmup=2, iterations=5)
    assert ran == ["prepare"] + ["run"] * 7
    assert found["iterations"] == 5
    assert 0 <= found["p10"] <= found["median"] <= found["p90"]


def test_a_ratio_is_taken_repeat_by_repeat() -> None:
    # The machine was half as fast in the second repeat: both suffered, and the ratio did not.
    peer, ours = row("Gloo", 10.0, 20.0, 10.0), row("Argosy", 1.0, 2.0, 1.0)
    assert (ratio(peer, ours).value, ratio(peer, ours).p10, ratio(peer, ours).p90) == (10.0, 10.0, 10.0)


def test_a_claim_holds_when_its_target_is_reached() -> None:
    peer, ours = row("Gloo", 3.0), row("Argosy", 1.0)
    assert versus("three times", peer, ours, 3).holds is True
    assert versus("more", peer, ours, 3.1).holds is False
    assert share("of the limit", ours, peer, 0.5).holds is False
    assert share("of the limit", ours, peer, 0.3).value == pytest.approx(1 / 3)
    assert claim("error", spread([0.2]), 0.25, "%", at_most=True).holds is True
    assert claim("error", spread([0.3]), 0.25, "%", at_most=True).holds is False


def test_what_was_not_measured_neither_holds_nor_fails() -> None:
    missing = versus("against Intel MPI", None, row("Argosy", 1.0), 3)
    assert (missing.value, missing.holds, missing.target) == (None, None, 3)
    assert all(one.holds is None for one in simulation_claims([]))


def test_a_peer_is_compared_at_its_best() -> None:
    report = Report("All-reduce", rows=[row("in place", 3.0, 3.0), row("out of place", 2.0, 2.0)])
    best = report.best("2 ranks", ["in place", "out of place", "absent"], MIB)
    assert best is not None
    assert best.contender == "out of place"
    assert report.best("2 ranks", ["in place"], 2 * MIB) is None


def test_contenders_take_turns_at_every_size() -> None:
    one, two = (Entry(name, Contender(name, ""), sizes) for name, sizes in (("one", [1, 2]), ("two", [2])))
    assert [(entry.label, size) for entry, size in in_turns([one, two], 0)] == [("one", 1), ("one", 2), ("two", 2)]
    assert [(entry.label, size) for entry, size in in_turns([one, two], 1)] == [("one", 1), ("two", 2), ("one", 2)]


def test_the_report_is_written_in_three_forms(tmp_path: Path) -> None:
    report = Report("All-reduce", rows=[row("Gloo", 3e-3, 4e-3), row("Argosy", 1e-3, 1e-3)], notes=["left out: a peer"])
    report.claims = [versus("Against Gloo", report.rows[0], report.rows[1], 3), versus("Against none", None, None, 2)]
    report.extra["simulation"] = [point("ring", 1.0, 1.1), point("tree", 2.0, 2.1)]
    file = tmp_path / "results" / "allreduce.json"
    write(report, file)
    draw(report, file.with_suffix(".svg"))
    content = json.loads(file.read_text())
    first, second = content["claims"]
    assert (first["name"], first["value"], first["target"], first["holds"]) == ("Against Gloo", 3.5, 3, True)
    assert (second["value"], second["holds"]) == (None, None)
    assert [line["seconds"] for line in content["rows"]] == [pytest.approx(3.5e-3), 1e-3]
    assert content["machine"]["cores"] >= 1
    text = markdown(report)
    assert file.with_suffix(".md").read_text() == text
    assert "| Against Gloo | 3.5x (3.1x to 3.9x) | >= 3x | yes |" in text
    assert "| Gloo | 3.5 ms (3 ms to 4 ms) |" in text
    assert "- left out: a peer" in text
    assert file.with_suffix(".svg").read_text().startswith("<?xml")


def test_lines_are_drawn_in_their_contenders_colours() -> None:
    assert style("Argosy, torch backend") != style("Argosy, in place")
    assert style("Intel MPI, in place") == style("Intel MPI, into another array")
    assert style("unheard of") == {}


def test_an_order_that_the_simulation_got_wrong_is_found() -> None:
    right = [point("ring", 1.0, 1.1), point("tree", 2.0, 2.2)]
    wrong = [point("ring", 1.0, 2.0, hosts=4), point("tree", 2.0, 1.0, hosts=4)]
    close = [point("ring", 1.0, 1.2, hosts=6), point("tree", 1.2, 1.19, hosts=6)]
    alike = [point("ring", 1.0, 1.1, hosts=8), point("tree", 1.02, 1.0, hosts=8), point("tree", 1.01, 1.08, hosts=8)]
    assert order(right) == (1, [], [])
    assert order(right + wrong + close) == (3, [f"ring on {hosts} x 1, 1 MiB and tree" for hosts in (4, 6)], [])
    assert order(right + alike) == (1, [], ["ring on 8 x 1, 1 MiB and tree", "tree on 8 x 1, 1 MiB and tree"])
    error, turned = simulation_claims(right + wrong)
    assert error.value == pytest.approx(1.0)
    assert (error.holds, turned.value, turned.holds) == (False, 1, False)


def test_the_simulation_is_told_what_the_links_were_measured_to_do() -> None:
    rows = [
        row("plain TCP, round trip", 2e-4, size=1),
        row("plain TCP, both ways", 0.2, size=4 * MIB),
        row("ring", 0.06),
    ]
    (found,) = compare(rows, hosts=2, per_host=1)
    # A ring of two sends half twice: 1 MiB at 20 MiB/s, and two latencies of half a round trip.
    assert found["simulated"] == pytest.approx(0.05 + 2e-4, rel=0.01)
    assert found["measured"] == 0.06
    assert compare(rows[2:], hosts=2, per_host=1) == []


def test_a_part_that_is_measured_again_leaves_the_rest_of_the_report(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    before = Report("Speed", rows=[row("Gloo", 3.0), row("Gloo", 5.0, setting="4 ranks")], extra={"simulation": [1]})
    write(before, path)
    again = Report("Speed", rows=[row("Gloo", 4.0)])
    again.keep(path)
    assert [(one.setting, one.repeats) for one in again.rows] == [("4 ranks", (5.0,)), ("2 ranks", (4.0,))]
    assert again.extra == {"simulation": [1]}
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "machine": {"processor": "another"}}))
    elsewhere = Report("Speed", rows=[row("Gloo", 4.0)])
    elsewhere.keep(path)
    assert len(elsewhere.rows) == 1
