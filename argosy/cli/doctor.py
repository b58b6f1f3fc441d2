"""`argosy doctor`: what this machine offers for communication, how fast its workers talk, and what a run has chosen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from argosy.cli import trial
from argosy.cli.machine import facts
from argosy.cli.simulate import in_bytes, in_seconds
from argosy.observe.events import Event

_MAX_WORKERS = 64


def doctor(
    workers: Annotated[int, typer.Option("--workers", "-n", help="Local workers for a short measurement.")] = 2,
    events: Annotated[
        Path | None, typer.Option(metavar="RUN_FOLDER", help="Show instead what a run measured and chose.")
    ] = None,
) -> None:
    """Show what this machine offers for communication, and measure it with a few workers."""
    console = Console()
    if events is not None:
        _show_run(console, events)
        return
    if not 1 <= workers <= _MAX_WORKERS:
        raise typer.BadParameter(f"--workers {workers}: expected 1 to {_MAX_WORKERS}")
    _show_machine(console)
    if workers == 1:
        console.print("\none worker has nobody to talk to: --workers 2 or more measures links", highlight=False)
        return
    console.print(f"\nmeasuring with {workers} workers ...", highlight=False)
    try:
        found = trial.run(workers)
    except trial.TrialError as error:
        console.print(f"[red]the measurement failed:[/red] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    _show_links(console, found["links"])
    _show_choices(console, found["sizes"])


def _show_machine(console: Console) -> None:
    table = Table(title="this machine", show_header=False)
    for fact in facts():
        trouble = f"\n[yellow]{escape(fact.trouble)}[/yellow]" if fact.trouble else ""
        table.add_row(fact.name, escape(fact.value) + trouble)
    console.print(table)


def _show_run(console: Console, folder: Path) -> None:
    files = sorted(folder.glob("rank*.events.jsonl"))
    if not files:
        raise typer.BadParameter(
            f"--events {folder}: there are no events of a run; give its folder, such as runs/train-..."
        )
    # All ranks have agreed on the links and chosen alike: any of them tells.
    recorded = next((told for told in map(_recorded, files) if told), [])
    if not recorded:
        console.print(f"{folder} has no record of links: the run had one worker, or did not use the engine")
        return
    for event in recorded:
        if event["event"] == "links":
            _show_links(console, event)
    _show_choices(console, [event for event in recorded if event["event"] == "algorithm"])


def _recorded(file: Path) -> list[Event]:
    return [event for event in _read(file) if event.get("event") in ("links", "algorithm")]


def _read(file: Path) -> Iterator[Event]:
    """The events of a file; a line that was cut off when a worker was killed is passed over."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event


def _show_links(console: Console, links: dict[str, Any]) -> None:
    hosts = links["hosts"]
    table = Table(title=f"links of {len(hosts)} workers on {_count(len(set(hosts)), 'host')}, as measured")
    for column in ("link", "latency", "bytes per second"):
        table.add_column(column, justify="left" if column == "link" else "right")
    if len(set(hosts)) < len(hosts):
        (_, latency), *_, (size, seconds) = links["memory_seconds"]
        table.add_row("shared memory, all-reduce", in_seconds(latency), f"{in_bytes(size / seconds)}/s")
        table.add_row("inside a host, messages", *_link(links, "inside"))
    if len(set(hosts)) > 1:
        table.add_row("between hosts, messages", *_link(links, "between"))
    table.add_row("reduction by one worker", "", f"{in_bytes(links['reduce_bytes_per_second'])}/s")
    console.print(table)


def _link(links: dict[str, Any], kind: str) -> tuple[str, str]:
    rate = f"{in_bytes(links[f'{kind}_bytes_per_second'])}/s"
    return in_seconds(links[f"{kind}_latency_seconds"]), rate


def _show_choices(console: Console, choices: list[dict[str, Any]]) -> None:
    measured = any("measured_seconds" in choice for choice in choices)
    table = Table(title="algorithms, by the bytes on each worker")
    for column in ("collective", "bytes", "algorithm", "predicted", *(["measured"] if measured else []), "why"):
        table.add_column(column, justify="right" if column in ("bytes", "predicted", "measured") else "left")
    for choice in choices:
        times = [in_seconds(choice["predicted_seconds"])]
        if measured:
            times.append(in_seconds(choice["measured_seconds"]) if "measured_seconds" in choice else "")
        table.add_row(choice["collective"], in_bytes(choice["bytes"]), choice["algorithm"], *times, _why(choice))
    console.print(table)


def _why(choice: dict[str, Any]) -> str:
    """The reason for a choice, in words."""
    others = sorted(choice["alternatives"].items(), key=lambda other: other[1])
    then = f"{others[0][0]} would take {in_seconds(others[0][1])}" if others else "there is no other"
    if choice["forced"]:
        return f"asked for; {then}"
    return f"all on one host; {then}" if choice["algorithm"] == "direct" else then


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
