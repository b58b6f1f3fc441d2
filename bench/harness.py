"""What benchmarks share: rows of measured times, ratios within a run, claims with their targets, and the report.

A row keeps the median of every repeat. A ratio is taken repeat by repeat, because contenders take turns within a
repeat and drift of the machine hits both alike; its value is the median of those, its spread their p10 and p90.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One contender at one size in one setting. Times are in seconds."""

    setting: str
    contender: str
    bytes: int
    repeats: tuple[float, ...]  # the median of each
    p10: float  # over iterations: the median over repeats
    p90: float

    @property
    def seconds(self) -> float:
        """The median over repeats."""
        return statistics.median(self.repeats)

    def at_best(self) -> Row:
        """As if all repeats had been like the fastest: the limit of what does not change, as a wire does not."""
        return replace(self, repeats=(min(self.repeats),) * len(self.repeats))

    def as_json(self) -> dict[str, Any]:
        """The row with its median."""
        return {**asdict(self), "seconds": self.seconds}


@dataclass(frozen=True)
class Value:
    """A figure and, if it has one, its spread over repeats."""

    value: float
    p10: float | None = None
    p90: float | None = None


@dataclass(frozen=True)
class Claim:
    """What we say, what was measured and whether it holds; `holds` is None where it could not be measured."""

    name: str
    target: float
    value: float | None
    holds: bool | None
    unit: str = "x"
    at_most: bool = False
    p10: float | None = None
    p90: float | None = None
    detail: str = ""


@dataclass
class Report:
    """Everything that a run found out. `figures` says what they are, and what stands in brackets."""

    title: str
    claims: list[Claim] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    figures: str = "Medians over repeats; in brackets the p10 and p90 of the single iterations."

    def add(self, rows: Iterable[Row], notes: Iterable[str] = ()) -> None:
        """Take in what a setting measured."""
        self.rows += rows
        self.notes += [note for note in notes if note not in self.notes]

    def find(self, setting: str, contender: str, size: int) -> Row | None:
        """A row, if it was measured."""
        same = (row for row in self.rows if (row.setting, row.contender, row.bytes) == (setting, contender, size))
        return next(same, None)

    def best(self, setting: str, contenders: Iterable[str], size: int) -> Row | None:
        """The fastest of some contenders: a peer that can be used in several ways is compared at its best."""
        rows = [row for name in contenders if (row := self.find(setting, name, size)) is not None]
        return min(rows, key=lambda row: row.seconds, default=None)

    def keep(self, path: Path, any_machine: bool = False) -> None:
        """Take in what an earlier report has of settings that were not measured now, if it is from this machine.

        Or from `any_machine`, which is then said: for figures that do not depend on it.
        """
        earlier = json.loads(path.read_text())
        if earlier["machine"] != machine():
            if not any_machine:
                return
            self.notes.append(f"the rest is from another machine: {earlier['machine']['processor']}")
        measured = {row.setting for row in self.rows}
        known = set(Row.__dataclass_fields__)
        rows = [Row(**{name: value for name, value in row.items() if name in known}) for row in earlier["rows"]]
        self.rows = [
            replace(row, repeats=tuple(row.repeats)) for row in rows if row.setting not in measured
        ] + self.rows
        fixed = {"title", "claims", "rows", "machine", "notes"}
        self.extra = {name: value for name, value in earlier.items() if name not in fixed} | self.extra


def quantile(values: Sequence[float], part: float) -> float:
    """A quantile, between the two nearest values.

    >>> quantile([1.0, 2.0, 3.0], 0.25)
    1.5
    """
    inorder = sorted(values)
    place = part * (len(inorder) - 1)
    below = math.floor(place)
    above = min(below + 1, len(inorder) - 1)
    return inorder[below] + (inorder[above] - inorder[below]) * (place - below)


def spread(values: Sequence[float]) -> Value:
    """The median of some values, with their p10 and p90."""
    return Value(statistics.median(values), quantile(values, 0.1), quantile(values, 0.9))


def ratio(slower: Row, faster: Row) -> Value:
    """How many times faster one row is than another, repeat by repeat."""
    return spread([a / b for a, b in zip(slower.repeats, faster.repeats, strict=False)])


def claim(
    name: str, value: Value | None, target: float, unit: str = "x", at_most: bool = False, detail: str = ""
) -> Claim:
    """A claim from a measured value: at least its target, or at most."""
    if value is None:
        return Claim(name, target, None, None, unit, at_most, detail=detail)
    holds = value.value <= target if at_most else value.value >= target
    return Claim(name, target, value.value, holds, unit, at_most, value.p10, value.p90, detail)


def versus(name: str, peer: Row | None, ours: Row | None, target: float) -> Claim:
    """The claim that we are so many times faster than a peer."""
    if peer is None or ours is None:
        return claim(name, None, target)
    detail = f"{peer.contender} {in_time(peer.seconds)}, {ours.contender} {in_time(ours.seconds)}"
    return claim(name, ratio(peer, ours), target, detail=detail)


def share(name: str, limit: Row | None, ours: Row | None, target: float) -> Claim:
    """The claim that we reach such a part of a limit."""
    if limit is None or ours is None:
        return claim(name, None, target, "%")
    detail = f"limit {in_time(limit.seconds)} ({limit.contender}), {ours.contender} {in_time(ours.seconds)}"
    return claim(name, ratio(limit, ours), target, "%", detail=detail)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory.split()[1]) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def in_time(seconds: float) -> str:
    """A time as people write it: three digits.

    >>> in_time(0.0466), in_time(1.5e-6), in_time(2.0), in_time(0.00123)
    ('46.6 ms', '1.5 us', '2 s', '1.23 ms')
    """
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def in_bytes(size: int) -> str:
    """A size as people write it.

    >>> in_bytes(1024), in_bytes(64 << 20), in_bytes(1)
    ('1 KiB', '64 MiB', '1 B')
    """
    unit = min(3, (size.bit_length() - 1) // 10) if size else 0
    return f"{size / 2 ** (10 * unit):.4g} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


def in_unit(value: float, unit: str) -> str:
    """A claim's figure.

    >>> in_unit(31.415, "x"), in_unit(0.956, "%"), in_unit(2, "")
    ('31.4x', '95.6 %', '2')
    """
    return f"{value * 100:.3g} %" if unit == "%" else f"{value:.3g}{unit}"


def markdown(report: Report) -> str:
    """The claims and the times as Markdown tables."""
    about = machine()
    lines = [f"# {report.title}", ""]
    lines += [f"{about['processor']}, {about['cores']} cores, {about['memory_gib']} GiB, Linux {about['kernel']}.", ""]
    lines += ["| claim | measured (spread) | target | holds | |", "|---|---|---|---|---|"]
    lines += [_claim_line(one) for one in report.claims]
    lines += ["", report.figures, ""]
    for setting in dict.fromkeys(row.setting for row in report.rows):
        lines += [f"## {setting}", "", *_setting_table([row for row in report.rows if row.setting == setting]), ""]
    if report.notes:
        lines += ["## Notes", "", *(f"- {note}" for note in report.notes), ""]
    return "\n".join(lines)


def verdict(one: Claim) -> tuple[str, str, str]:
    """What was measured, the target, and whether the claim holds, in words."""
    measured = "-" if one.value is None else in_unit(one.value, one.unit)
    if one.p10 is not None and one.p90 is not None:
        measured += f" ({in_unit(one.p10, one.unit)} to {in_unit(one.p90, one.unit)})"
    target = f"{'<=' if one.at_most else '>='} {in_unit(one.target, one.unit)}"
    return measured, target, {True: "yes", False: "no", None: "not measured"}[one.holds]


def _claim_line(one: Claim) -> str:
    measured, target, holds = verdict(one)
    holds = "**no**" if one.holds is False else holds
    return f"| {one.name} | {measured} | {target} | {holds} | {one.detail} |"


def _setting_table(rows: Sequence[Row]) -> list[str]:
    sizes = sorted({row.bytes for row in rows})
    lines = ["| | " + " | ".join(in_bytes(size) for size in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    cells = {(row.contender, row.bytes): row for row in rows}
    for name in dict.fromkeys(row.contender for row in rows):
        shown = [_cell(cells.get((name, size))) for size in sizes]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return lines


def _cell(row: Row | None) -> str:
    return "" if row is None else f"{in_time(row.seconds)} ({in_time(row.p10)} to {in_time(row.p90)})"


def write(report: Report, path: Path) -> None:
    """The report as JSON, and as Markdown beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "title": report.title,
        "claims": [asdict(one) for one in report.claims],
        "rows": [row.as_json() for row in report.rows],
        "machine": machine(),
        "notes": report.notes,
        **report.extra,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(report))
