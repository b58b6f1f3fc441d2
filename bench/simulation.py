"""Simulated against measured time, for every algorithm of all-reduce on 2 to 8 ranks.

Hosts are namespaces whose links are slow enough that the network, and not this machine's cores, decides. What the
simulation is told about the links is measured in the same run with plain sockets, never fitted to our own times.

What is simulated is one operation that all ranks begin at once. So a barrier follows each that is measured: back to
back, ranks drift apart, and messages of different operations meet on a link.

The congestion control is Reno's, which namespaces may always use, and which sends what the link takes. BBR, the default
of some machines, paces a connection by what it has seen of it in the last seconds: where partners change from round to
round (halving-doubling, binary blocks) it left the links idle for up to 30 % of the time, which no simulation of links
can know.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from crew import Contender
from harness import Claim, Report, Row, Value, claim, in_bytes, spread
from lineup import argosy_group
from network import network
from rounds import Entry, Plan, measure

from argosy.comm.algorithms.catalogue import ALGORITHMS, suits
from argosy.comm.cost import simulate
from argosy.comm.schedule import Collective
from argosy.comm.topology import Link, Topology

MBITS = 100.0
CONGESTION = "reno"
LAYOUTS = ((2, 1), (3, 1), (4, 1), (6, 1), (8, 1), (2, 2), (4, 2))  # hosts, ranks on each
SIZES = (1 << 20, 4 << 20)
TIE = 0.05  # two algorithms whose simulated times are closer than this are said to be alike
STREAM, PING = "plain TCP, both ways", "plain TCP, round trip"
STREAM_BYTES = 4 << 20


def run(report: Report, plan: Plan, quick: bool) -> None:
    """Measure all layouts, simulate them, and add rows and claims to the report."""
    plan = replace(plan, launches=1, repeats=min(plan.repeats, 7), least_iterations=1, most_iterations=1)
    layouts, sizes = (LAYOUTS[1:2], SIZES[:1]) if quick else (LAYOUTS, SIZES)
    points: list[dict[str, Any]] = []
    for hosts, per_host in layouts:
        setting = f"Simulation: {hosts} hosts x {per_host}, {MBITS:g} Mbit/s"
        with network(hosts, per_host, MBITS, CONGESTION) as places:
            rows, notes = measure(setting, entries(hosts, per_host, sizes), places, plan)
        report.add(rows, notes)
        points += compare(rows, hosts, per_host)
    report.extra["simulation"] = points


def claims_of(report: Report) -> list[Claim]:
    """The claims on what was simulated and measured."""
    return claims(report.extra.get("simulation", []))


def entries(hosts: int, per_host: int, sizes: Sequence[int]) -> list[Entry]:
    """Every algorithm that suits, and the plain connection that tells what the links can do."""
    ranks = hosts * per_host
    wire = Contender("wire", "wire.py")
    ends = slice(0, 2 * per_host, per_host)
    names = [name for name in ALGORITHMS[Collective.ALL_REDUCE] if suits(name, Collective.ALL_REDUCE, ranks)]
    ours = argosy_group()
    return [
        Entry(PING, wire, [1], {"way": "ping"}, ends),
        Entry(STREAM, wire, [STREAM_BYTES], {"way": "stream"}, ends),
        *(Entry(name, ours, sizes, {"algorithm": name, "in_step": True}) for name in names),
    ]


def compare(rows: Sequence[Row], hosts: int, per_host: int) -> list[dict[str, Any]]:
    """For each algorithm and size, the measured and the simulated seconds."""
    by_name = {row.contender: row for row in rows if row.contender in (PING, STREAM)}
    if len(by_name) < 2:
        return []
    link = Link(by_name[PING].seconds / 2, STREAM_BYTES / by_name[STREAM].seconds)
    topology = Topology.uniform(hosts * per_host, per_host, between=link)
    return [
        {
            "hosts": hosts,
            "per_host": per_host,
            "algorithm": row.contender,
            "bytes": row.bytes,
            "measured": row.seconds,
            "repeats": row.repeats,
            "simulated": simulate(ALGORITHMS[Collective.ALL_REDUCE][row.contender](topology), topology, row.bytes),
        }
        for row in rows
        if row.contender in ALGORITHMS[Collective.ALL_REDUCE]
    ]


def claims(points: Sequence[dict[str, Any]]) -> list[Claim]:
    """How far off the simulation is at worst, and how many pairs of algorithms it puts in the wrong order."""
    names = ("Simulated against measured time, the worst of all", "Pairs of algorithms that are in another order")
    if not points:
        return [claim(names[0], None, 0.25, "%", at_most=True), claim(names[1], None, 0, "", at_most=True)]
    off = [_off(point, point["measured"]) for point in points]
    worst = points[off.index(max(off))]
    repeats = spread([_off(worst, seconds) for seconds in worst["repeats"]])
    pairs, wrong, missed = order(points)
    details = (
        f"{_name(worst)}; the median of {len(off)} is {statistics.median(off):.1%}",
        f"of {pairs} pairs that are simulated {TIE:.0%} apart{_listed(wrong)}; "
        f"simulated alike, and measured {TIE:.0%} apart: {len(missed)}{_listed(missed)}",
    )
    return [
        claim(names[0], replace(repeats, value=max(off)), 0.25, "%", at_most=True, detail=details[0]),
        claim(names[1], Value(len(wrong)), 0, "", at_most=True, detail=details[1]),
    ]


def order(points: Sequence[dict[str, Any]]) -> tuple[int, list[str], list[str]]:
    """How many pairs the simulation puts in an order, those which were measured in another, however little; and those
    that it has alike, and which were measured apart.
    """
    pairs, wrong, missed = 0, [], []
    for number, one in enumerate(points):
        for two in points[number + 1 :]:
            if any(one[key] != two[key] for key in ("hosts", "per_host", "bytes")):
                continue
            simulated, measured = (one[key] / two[key] - 1 for key in ("simulated", "measured"))
            name = f"{_name(one)} and {two['algorithm']}"
            if abs(simulated) < TIE:
                missed += [name] if abs(measured) >= TIE else []
                continue
            pairs += 1
            wrong += [name] if simulated * measured <= 0 else []
    return pairs, wrong, missed


def _listed(names: Sequence[str]) -> str:
    return f" ({', '.join(names)})" if names else ""


def _off(point: dict[str, Any], seconds: float) -> float:
    return abs(float(point["simulated"]) / seconds - 1)


def _name(point: dict[str, Any]) -> str:
    return f"{point['algorithm']} on {point['hosts']} x {point['per_host']}, {in_bytes(point['bytes'])}"
