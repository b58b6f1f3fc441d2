"""`argosy simulate`: how long the algorithms of a collective would take on a cluster, before there is one."""

from __future__ import annotations

import math
import re
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from argosy.comm.algorithms.catalogue import ALGORITHMS, suits
from argosy.comm.cost import bytes_sent, simulate_sizes
from argosy.comm.schedule import Collective
from argosy.comm.topology import Link, Topology

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_COLLECTIVES = {kind.value.replace("_", ""): kind for kind in Collective}
_PLOT_ROWS, _PLOT_SIZES = 14, 11


def simulate(
    collective: Annotated[str, typer.Argument(help=f"One of {', '.join(_COLLECTIVES)}.")],
    ranks: Annotated[int, typer.Option(help="Workers in all.")] = 16,
    per_host: Annotated[int, typer.Option(help="Workers on each host.")] = 1,
    size: Annotated[str, typer.Option("--bytes", help="Data on each worker, such as 64KiB or 100MiB.")] = "100MiB",
    gbits: Annotated[float, typer.Option(help="A host's link to the network, in gigabits per second.")] = 10.0,
    latency_us: Annotated[float, typer.Option(help="Latency between hosts, in microseconds.")] = 30.0,
    host_gbytes: Annotated[float, typer.Option(help="A worker's copies inside its host, in GB per second.")] = 5.0,
    host_latency_us: Annotated[float, typer.Option(help="Latency inside a host, in microseconds.")] = 1.0,
    reduce_gbytes: Annotated[float, typer.Option(help="A worker's reductions, in GB per second.")] = 10.0,
) -> None:
    """Simulate the algorithms of a COLLECTIVE on a cluster: a table for one size, a plot over sizes."""
    kind, size_bytes = parse_collective(collective), parse_size(size)
    positive = {"ranks": ranks, "per-host": per_host, "gbits": gbits}
    positive |= {"host-gbytes": host_gbytes, "reduce-gbytes": reduce_gbytes}
    for name, value in positive.items():
        if value <= 0:
            raise typer.BadParameter(f"--{name} {value}: it must be more than 0")
    for name, value in (("latency-us", latency_us), ("host-latency-us", host_latency_us)):
        if value < 0:
            raise typer.BadParameter(f"--{name} {value}: it must be 0 or more")
    topology = Topology.uniform(
        ranks,
        per_host,
        inside=Link(host_latency_us * 1e-6, host_gbytes * 1e9),
        between=Link.ethernet(gbits, latency_us * 1e-6),
        reduce_bytes_per_second=reduce_gbytes * 1e9,
    )
    sizes = [size_bytes, *(2.0**power for power in range(10, 10 + 2 * _PLOT_SIZES, 2))]
    times = {}
    table = Table(title=f"{kind.value} of {size} on {ranks} workers, {per_host} per host, {gbits:g} Gbit/s")
    for column in ("algorithm", "rounds", "sent by a worker", "sent by a host", "time"):
        table.add_column(column, justify="left" if column == "algorithm" else "right")
    for name, algorithm in ALGORITHMS[kind].items():
        if suits(name, kind, ranks):
            schedule = algorithm(topology)
            times[name] = simulate_sizes(schedule, topology, sizes).tolist()
            by_rank, by_host = bytes_sent(schedule, topology, size_bytes)
            row = (str(len(schedule.rounds)), in_bytes(by_rank), in_bytes(by_host), in_seconds(times[name][0]))
            table.add_row(name, *row)
    console = Console()
    console.print(table)
    console.print(plot({name: values[1:] for name, values in times.items()}, sizes[1:]), highlight=False)


def parse_collective(text: str) -> Collective:
    """A collective from its name; dashes and underscores do not matter."""
    found = _COLLECTIVES.get(re.sub("[-_]", "", text.lower()))
    if found is None:
        raise typer.BadParameter(f"{text}: expected one of {', '.join(_COLLECTIVES)}")
    return found


def parse_size(text: str) -> float:
    """Bytes from a size such as 100MiB.

    >>> parse_size("100MiB"), parse_size("1.5kB"), parse_size("64")
    (104857600.0, 1500.0, 64.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"--bytes {text}: expected a size such as 64KiB, 100MiB or 1GB")
    return float(match[1]) * _UNITS[match[2] or ""]


def in_bytes(value: float) -> str:
    """A size as people write it.

    >>> in_bytes(104857600), in_bytes(1536), in_bytes(0)
    ('100 MiB', '1.5 KiB', '0 B')
    """
    unit = min(3, int(math.log2(value) // 10)) if value >= 1 else 0
    return f"{value / 2 ** (10 * unit):.4g} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


def in_seconds(value: float) -> str:
    """A time as people write it.

    >>> in_seconds(0.0123), in_seconds(2.5e-6), in_seconds(3)
    ('12.3 ms', '2.5 us', '3 s')
    """
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def plot(times: dict[str, list[float]], sizes: list[float]) -> str:
    """Time over size, both logarithmic, a letter for each algorithm; where several meet, the faster one is on top."""
    letters = {name: chr(ord("A") + number) for number, name in enumerate(times)}
    known = [math.log10(value) for values in times.values() for value in values if value > 0]
    if not known:
        return ""
    low, high = min(known), max(known)
    rows = [[" "] * (6 * len(sizes)) for _ in range(_PLOT_ROWS + 1)]
    for at in range(len(sizes)):
        for name in sorted(times, key=lambda name: -times[name][at]):
            height = round((math.log10(times[name][at]) - low) / (high - low or 1) * _PLOT_ROWS)
            rows[_PLOT_ROWS - height][6 * at + 2] = letters[name]
    lines = []
    for number, row in enumerate(rows):
        shown = in_seconds(10 ** (high - (high - low) * number / _PLOT_ROWS)) if number % 3 == 0 else ""
        lines.append(f"{shown:>9} |{''.join(row)}")
    lines.append(" " * 10 + "+" + "-" * (6 * len(sizes)))
    lines.append(" " * 10 + "".join(f"{in_bytes(size).replace(' ', '').replace('iB', ''):>6}" for size in sizes))
    lines.append(" " * 11 + "   ".join(f"{letter} {name}" for name, letter in letters.items()))
    return "\n".join(lines)
