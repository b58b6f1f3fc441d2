"""The plot of a report: time over size in each setting, and simulated against measured time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import Report, Row, in_bytes, in_time

# Ours in blue, the peers each in a colour of its own, limits grey and dashed.
STYLES: dict[str, dict[str, Any]] = {
    "Argosy": {"color": "#08519c", "linewidth": 2.2},
    "Argosy, in place, hierarchical": {"color": "#08519c", "linestyle": "--"},
    "Argosy, torch": {"color": "#4292c6", "linewidth": 2.2},
    "Gloo": {"color": "#d94801"},
    "Intel MPI": {"color": "#238b45"},
    "Intel MPI, shared": {"color": "#74c476"},
    "Open MPI": {"color": "#807dba"},
    "plain TCP": {"color": "#737373", "linestyle": "--"},
    "memory": {"color": "#737373", "linestyle": ":"},
    "memory: add": {"color": "#252525", "linestyle": ":"},
    "memory: copy": {"color": "#bdbdbd", "linestyle": ":"},
}
MARKS = {"ring": "o", "halving_doubling": "s", "binary_blocks": "D", "tree": "^", "hierarchical": "P"}


def draw(report: Report, path: Path) -> None:
    """Write the picture, if matplotlib is there."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is missing (pip install 'argosy[demo]')", flush=True)
        return
    matplotlib.use("svg")
    from matplotlib import pyplot

    points = report.extra.get("simulation", [])
    settings = [name for name in dict.fromkeys(row.setting for row in report.rows) if not name.startswith("Simulation")]
    panels = len(settings) + bool(points)
    if not panels:
        return
    columns = min(2, panels)
    lines = -(-panels // columns)
    figure, grid = pyplot.subplots(lines, columns, figsize=(7.5 * columns, 5 * lines), squeeze=False)
    places = list(grid.flat)
    for axes, setting in zip(places, settings, strict=False):
        _times(axes, setting, [row for row in report.rows if row.setting == setting])
    if points:
        _simulated(places[len(settings)], points)
    for axes in places[panels:]:
        axes.set_axis_off()
    figure.suptitle(report.title)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def style(name: str) -> dict[str, Any]:
    """The style of a line: that of the longest name it begins with."""
    fitting = [known for known in STYLES if name.startswith(known)]
    return STYLES[max(fitting, key=len)] if fitting else {}


def _times(axes: Any, setting: str, rows: Sequence[Row]) -> None:
    for name in dict.fromkeys(row.contender for row in rows):
        mine = sorted((row for row in rows if row.contender == name), key=lambda row: row.bytes)
        sizes, look = [row.bytes for row in mine], style(name)
        dashes = {"linestyle": ":"} if "another" in name else {}
        axes.plot(sizes, [row.seconds for row in mine], marker="o", markersize=4, label=name, **{**look, **dashes})
        axes.fill_between(
            sizes, [row.p10 for row in mine], [row.p90 for row in mine], alpha=0.12, color=look.get("color")
        )
    ticks = sorted({row.bytes for row in rows})
    axes.set(xscale="log", yscale="log", title=setting, xticks=ticks, xticklabels=[in_bytes(size) for size in ticks])
    axes.set_ylabel("time, p10 to p90 shaded")
    axes.xaxis.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: in_time(value))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)


def _simulated(axes: Any, points: Sequence[dict[str, Any]]) -> None:
    for name in dict.fromkeys(point["algorithm"] for point in points):
        mine = [point for point in points if point["algorithm"] == name]
        measured, simulated = ([point[key] for point in mine] for key in ("measured", "simulated"))
        axes.plot(measured, simulated, MARKS.get(name, "o"), label=name, alpha=0.7)
    ends = [min(point["measured"] for point in points), max(point["measured"] for point in points)]
    axes.plot(ends, ends, color="#737373", linewidth=1)
    axes.fill_between(ends, [end * 0.75 for end in ends], [end * 1.25 for end in ends], color="#737373", alpha=0.12)
    axes.set(xscale="log", yscale="log", xlabel="measured", ylabel="simulated", title="Cost model, 25 % shaded")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: in_time(value))
        axis.set_minor_formatter(lambda value, _: "")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
