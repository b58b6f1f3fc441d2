"""All-reduce, measured: us and the peers that are installed, in one run, as ratios. See `--help`.

Settings: 2 and 4 ranks on one host; 2 hosts (network namespaces) at 1 Gbit/s and unlimited; and the cost model
against measured times. Read `lineup.py` (who runs), `rounds.py` (how they take turns), `harness.py` (what is claimed).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import lineup
import network
import picture
import simulation
from crew import Contender, Place
from harness import Claim, Report, in_bytes, share, versus
from rounds import Entry, Plan, measure
from suite import Part, main

KIB, MIB = 1 << 10, 1 << 20
ONE_HOST_SIZES = (KIB, 256 * KIB, MIB, 16 * MIB, 64 * MIB)
TWO, FOUR = "2 ranks on one host", "4 ranks on one host"
SLOW, FAST, PAIR = "2 hosts x 2 ranks, 1 Gbit/s", "2 hosts x 2 ranks, unlimited", "2 hosts x 1 rank, unlimited"
MEMORY = ("memory: add", "memory: scale", "memory: copy")
WIRE = "plain TCP, both ways"
GBIT = 1000.0  # Mbit/s


def two_ranks(report: Report, plan: Plan, quick: bool) -> None:
    """Two ranks on one host: in place, and through torch, against Gloo, Intel MPI and the memory itself."""
    memory = Contender("memory", "memory.py")
    ways = [Entry(name, memory, [64 * MIB], {"way": name.split()[-1]}, together=True) for name in MEMORY]
    mpi, notes = lineup.mpi(2, _cores(), ONE_HOST_SIZES)
    entries = [*lineup.ours_and_gloo("lo", ONE_HOST_SIZES), *mpi, *ways]
    # Whether two cores of a virtual machine share a cache, or even a core, changes within a second, and all times with
    # it: turns are many and short, so that all contenders meet the same.
    often = replace(plan, launches=2 * plan.launches, repeats=2 * plan.repeats, seconds=plan.seconds / 4)
    rows, failures = measure(TWO, entries, [Place()] * 2, often)
    report.add(rows, [*notes, *failures])


def claims_of_two_ranks(report: Report) -> Iterator[Claim]:
    """In place against Gloo, Intel MPI in any memory and the memory limit; ordinary tensors against ordinary arrays."""
    for size, gloo_target, intel_target in ((MIB, 30, 3), (64 * MIB, 6, 2.5)):
        name = f"In place, 2 ranks, {in_bytes(size)}, against"
        ours, gloo = report.find(TWO, lineup.IN_PLACE, size), report.find(TWO, lineup.GLOO, size)
        yield versus(f"{name} Gloo", gloo, ours, gloo_target)
        intel = report.best(TWO, lineup.INTEL_ORDINARY + lineup.INTEL_SHARED, size)
        yield versus(f"{name} Intel MPI at its best", intel, ours, intel_target)
    limit = report.best(TWO, MEMORY, 64 * MIB)
    yield share(
        "In place, 2 ranks, 64 MiB, of the memory limit", limit, report.find(TWO, lineup.IN_PLACE, 64 * MIB), 0.6
    )
    for size, target in ((KIB, 15), (MIB, 5), (64 * MIB, 2)):
        ours, gloo = report.find(TWO, lineup.THROUGH_TORCH, size), report.find(TWO, lineup.GLOO, size)
        yield versus(f"Through torch, ordinary tensors, 2 ranks, {in_bytes(size)}, against Gloo", gloo, ours, target)
    for size in (256 * KIB, MIB, 16 * MIB, 64 * MIB):
        ours, intel = report.find(TWO, lineup.THROUGH_TORCH, size), report.best(TWO, lineup.INTEL_ORDINARY, size)
        yield versus(f"Through torch, ordinary tensors, 2 ranks, {in_bytes(size)}, against Intel MPI", intel, ours, 1)


def four_ranks(report: Report, plan: Plan, quick: bool) -> None:
    """Four ranks on one host: more than it has cores, on the machines that the targets are for."""
    mpi, notes = lineup.mpi(4, _cores(), ONE_HOST_SIZES)
    rows, failures = measure(FOUR, [*lineup.ours_and_gloo("lo", ONE_HOST_SIZES), *mpi], [Place()] * 4, plan)
    report.add(rows, [*notes, *failures])


def claims_of_four_ranks(report: Report) -> Iterator[Claim]:
    """In place against Gloo."""
    for size, target in ((KIB, 50), (16 * MIB, 3)):
        ours, gloo = report.find(FOUR, lineup.IN_PLACE, size), report.find(FOUR, lineup.GLOO, size)
        yield versus(f"In place, 4 ranks, {in_bytes(size)}, against Gloo", gloo, ours, target)


def slow_link(report: Report, plan: Plan, quick: bool) -> None:
    """Two hosts of two ranks at 1 Gbit/s: what counts is how many bytes cross the link."""
    sizes = [MIB, 64 * MIB]
    forced = lineup.argosy_group("argosy group, hierarchical")
    entries = [
        *lineup.ours_and_gloo(network.DEVICE, sizes),
        Entry(lineup.HIERARCHICAL, forced, sizes, {"algorithm": "hierarchical"}),
        _stream(sizes, per_host=2),
    ]
    patient = replace(plan, launches=1, least_iterations=2)
    with network.network(hosts=2, per_host=2, mbits=GBIT) as places:
        rows, notes = measure(SLOW, entries, places, patient)
    report.add(rows, notes)


def claims_of_slow_link(report: Report) -> Iterator[Claim]:
    """Hierarchical against Gloo and against the wire."""
    ours, gloo, wire = (report.find(SLOW, name, 64 * MIB) for name in (lineup.HIERARCHICAL, lineup.GLOO, WIRE))
    yield versus(f"{SLOW}, 64 MiB, hierarchical, against Gloo", gloo, ours, 1.4)
    # A host sends the half that it does not reduce and the half that it did: as much as the plain stream sends.
    yield share(f"{SLOW}, 64 MiB, hierarchical, of the wire limit", wire and wire.at_best(), ours, 0.9)


def fast_link(report: Report, plan: Plan, quick: bool) -> None:
    """Two hosts with nothing between them but the kernel: what counts is the work per byte."""
    sizes = [MIB, 16 * MIB] if quick else [KIB, MIB, 16 * MIB, 64 * MIB]
    for setting, per_host in ((FAST, 2), (PAIR, 1)):
        entries = [*lineup.ours_and_gloo(network.DEVICE, sizes), _stream(sizes, per_host)]
        with network.network(hosts=2, per_host=per_host, mbits=None) as places:
            rows, notes = measure(setting, entries, places, plan)
        report.add(rows, notes)


def claims_of_fast_link(report: Report) -> Iterator[Claim]:
    """Against Gloo, with one rank and with two on each host."""
    for setting in (FAST, PAIR):
        ours, gloo = report.find(setting, lineup.IN_PLACE, 16 * MIB), report.find(setting, lineup.GLOO, 16 * MIB)
        yield versus(f"{setting}, 16 MiB, against Gloo", gloo, ours, 1.5)


def _stream(sizes: Sequence[int], per_host: int) -> Entry:
    return Entry(WIRE, Contender("wire", "wire.py"), sizes, {"way": "stream"}, slice(0, 2 * per_host, per_host))


PARTS = {
    "two-ranks": Part(two_ranks, claims_of_two_ranks),
    "four-ranks": Part(four_ranks, claims_of_four_ranks),
    "slow-link": Part(slow_link, claims_of_slow_link, needs_network=True),
    "fast-link": Part(fast_link, claims_of_fast_link, needs_network=True),
    "simulation": Part(simulation.run, simulation.claims_of, needs_network=True),
}


def _cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    main("All-reduce", PARTS, Plan(), Plan(launches=1, repeats=2, seconds=0.03), picture.draw)
