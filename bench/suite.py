"""The command line that all benchmarks have: parts that are measured one after the other, and one report of them."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import network
from harness import Claim, Report, verdict, write
from rounds import Plan


@dataclass(frozen=True)
class Part:
    """Measures into a report, and then says what it claims of what is there, and what else is to be told of it."""

    run: Callable[[Report, Plan, bool], None]
    claims: Callable[[Report], Iterable[Claim]]
    needs_network: bool = False
    notes: Callable[[Report], Iterable[str]] = lambda report: ()


def main(
    title: str,
    parts: Mapping[str, Part],
    plan: Plan,
    quick_plan: Plan,
    draw: Callable[[Report, Path], None] | None = None,
    any_machine: bool = False,
    figures: str = Report.figures,
) -> None:
    """Measure the parts that were asked for and write the report, also of a run that is cut short.

    What is kept of earlier runs is this machine's, unless figures are the same on `any_machine`. `figures` says what
    they are.
    """
    parser = argparse.ArgumentParser(description=f"{title}: Argosy and its peers, measured in one run.")
    parser.add_argument("--json", type=Path, required=True, help="where to write; the table is put beside it")
    parser.add_argument("--quick", action="store_true", help="a smoke test: few repeats, figures that mean little")
    kept = "of the others the report keeps what it has from earlier runs"
    parser.add_argument("--only", action="append", choices=list(parts), help=f"measure this part, or several; {kept}")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that namespaces and processes are cleared away
    report = Report(title + (" (a quick run: its figures mean little)" if options.quick else ""), figures=figures)
    done: list[str] = []
    try:
        for name in options.only or list(parts):
            hindrance = network.possible() if parts[name].needs_network else None
            if hindrance:
                report.notes.append(f"{name} left out: {hindrance}")
            else:
                parts[name].run(report, quick_plan if options.quick else plan, options.quick)
                done.append(name)
    finally:
        if options.only and options.json.exists():
            report.keep(options.json, any_machine)
            told = [f"{name}{'' if name in done else ' (not to its end)'}" for name in options.only]
            report.notes.append(f"measured later than the rest: {', '.join(told)}")
        report.notes += [note for part in parts.values() for note in part.notes(report)]
        report.claims = [one for part in parts.values() for one in part.claims(report)]
        write(report, options.json)
        if draw is not None:
            draw(report, options.json.with_suffix(".svg"))
    for note in report.notes:
        print(f"note: {note}")
    for one in report.claims:
        measured, target, holds = verdict(one)
        print(f"{holds:12}  {one.name}: {measured}, target {target}")
