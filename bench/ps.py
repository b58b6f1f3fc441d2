"""Parameter servers, measured: us, TensorFlow's ParameterServerStrategy and torch's rpc, in one run. See `--help`.

One server and two workers. A batch has 4096 x 26 ids of a table with a million rows of 16 numbers; a worker pulls their
rows, pushes a gradient for each, and Adagrad is applied to them by the server. A run is ten batches, and ends when all
of it is applied. Peers look ids up as they come, or made distinct first: they are compared at their best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import network
import peers
import ps_jobs
import table
from crew import Contender, Place
from harness import Claim, Report, Row, claim, ratio, spread
from rounds import Entry, Plan, measure
from suite import Part, main

IDS, DIM, BATCHES, WORKERS = 4096 * 26, 16, 10, 2
SIZE = IDS * DIM * 4  # bytes of a batch's rows: the column of the table
ZIPF, UNIFORM = "zipf", "uniform"
KINDS = {ZIPF: "Zipf(1.1) ids", UNIFORM: "uniform ids"}
OURS, TENSORFLOW, RPC = "Argosy", "TensorFlow ParameterServerStrategy", "torch.distributed.rpc"
PEERS = tuple(f"{peer}{way}" for peer in (TENSORFLOW, RPC) for way in ("", ", distinct ids"))
HERE, APART = "1 server + 2 workers on one host", "a server and 2 workers on two hosts, unlimited"
ONE, TWO = "Argosy, 1 server", "Argosy, 2 servers"
TARGETS = {HERE: {ZIPF: 5.0, UNIFORM: 3.0}, APART: {ZIPF: 2.0, UNIFORM: 2.0}}
PLAN = Plan(launches=1, repeats=4, seconds=1.0, least_iterations=2, warmup=0.3)


def argosy(name: str = OURS, servers: int = 1) -> Contender:
    """Us, with some servers."""
    return Contender(name, "ps_argosy.py", environment={"BENCH_SERVERS": str(servers)})


def tensorflow() -> Contender:
    """In an environment of its own."""
    programs = peers.environment("tensorflow", ["tensorflow-cpu==2.21.*"])
    return Contender(TENSORFLOW, "ps_tensorflow.py", str(programs / "python"))


def rpc(interface: str) -> Contender:
    """torch's, by sockets of an interface."""
    return Contender(RPC, "ps_rpc.py", environment={"TP_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface})


def setting_of(where: str, kind: str) -> str:
    """A table of times."""
    return f"{where}, {KINDS[kind]}"


def exchange(report: Report, plan: Plan, places: Sequence[Place], where: str, interface: str) -> None:
    """All contenders, with both kinds of ids. The last place is that of TensorFlow's coordinator."""
    crews = [(OURS, argosy(), {}, 3)]
    theirs = [(rpc(interface), 3)]
    try:
        theirs.append((tensorflow(), 4))
    except peers.PeerMissing as error:
        report.notes.append(f"left out: {error}")
    for peer, ranks in theirs:
        crews += [(peer.name, peer, {"distinct": False}, ranks)]
        crews += [(f"{peer.name}, distinct ids", peer, {"distinct": True}, ranks)]
    for kind in KINDS:
        operation = {"way": "rows", "ids": kind, "rule": "adagrad"}
        entries = [
            Entry(label, crew, [SIZE], {**operation, **more}, slice(0, ranks), together=True)
            for label, crew, more, ranks in crews
        ]
        report.add(*measure(setting_of(where, kind), entries, places, plan))


def here(report: Report, plan: Plan, quick: bool) -> None:
    """On one host."""
    exchange(report, plan, [Place()] * 4, HERE, "lo")


def apart(report: Report, plan: Plan, quick: bool) -> None:
    """The server in a namespace, the workers in another."""
    with network.network(hosts=2, per_host=3, mbits=None) as places:
        exchange(report, plan, [places[0], *places[3:]], APART, network.DEVICE)


def claims_of(where: str) -> Callable[[Report], Iterator[Claim]]:
    """Against the faster peer, at its best."""

    def claims(report: Report) -> Iterator[Claim]:
        for kind, target in TARGETS[where].items():
            setting = setting_of(where, kind)
            ours, peer = report.find(setting, OURS, SIZE), report.best(setting, PEERS, SIZE)
            yield compared(f"{setting}: rows per second, pull and push, against the best peer", peer, ours, target)

    return claims


def compared(name: str, slower: Row | None, faster: Row | None, target: float) -> Claim:
    """A claim in rows per second."""
    if slower is None or faster is None:
        return claim(name, None, target)
    told = ", ".join(f"{row.contender} {WORKERS * BATCHES * IDS / row.seconds / 1e6:.3g} M" for row in (slower, faster))
    return claim(name, ratio(slower, faster), target, detail=told)


def servers(report: Report, plan: Plan, quick: bool) -> None:
    """The same batches on one server and on two."""
    for kind in KINDS:
        entries = [
            Entry(label, argosy(label, count), [SIZE], {"way": "rows", "ids": kind, "rule": "adagrad"}, part, True)
            for label, count, part in ((ONE, 1, slice(0, 3)), (TWO, 2, slice(0, 4)))
        ]
        before = cores()
        report.add(*measure(setting_of("1 and 2 servers", kind), entries, [Place()] * 4, plan))
        busy, idle = (after - earlier for after, earlier in zip(cores(), before, strict=True))
        report.extra[f"cores busy, {kind}"] = busy / (busy + idle)


def cores() -> tuple[int, int]:
    """What all cores have done since the machine was started, in ticks: worked, and been idle."""
    user, nice, system, idle, waiting, *others = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return user + nice + system + sum(others), idle + waiting


def claims_of_servers(report: Report) -> Iterator[Claim]:
    """A second server; it cannot help where the cores have no time left for it, so that is told, too."""
    for kind in KINDS:
        one, two = (report.find(setting_of("1 and 2 servers", kind), name, SIZE) for name in (ONE, TWO))
        told = compared(f"2 servers on one host, {KINDS[kind]}: rows per second, against 1", one, two, 1.6)
        busy = report.extra.get(f"cores busy, {kind}")
        yield replace(told, detail=f"{told.detail}; cores busy {busy:.0%}") if busy is not None else told


def in_process(report: Report, plan: Plan, quick: bool) -> None:
    """A table by itself: lookup and Adagrad, and the same reads and writes on an array."""
    turns = [table.measure_table(repeats=3 if quick else 15) for _ in range(2 if quick else 5)]
    report.extra["table in process"] = turns


def claims_of_table(report: Report) -> Iterator[Claim]:
    """Of the machine's limit."""
    turns = report.extra.get("table in process", [])
    value = spread([turn["of_limit"] for turn in turns]) if turns else None
    detail = (
        ", ".join(f"{key[:-3]} {turns[-1][key]:.2f} ms" for key in turns[-1] if key.endswith("_ms")) if turns else ""
    )
    name = "Table in process, lookup and Adagrad of uniform ids: of the random-access limit"
    yield claim(name, value, 0.5, "%", detail=detail)


PARTS = {
    "host": Part(here, claims_of(HERE)),
    "hosts": Part(apart, claims_of(APART), needs_network=True),
    "steps": ps_jobs.steps_with(tensorflow, TENSORFLOW),
    "modes": ps_jobs.MODES_LEARNT,
    "slow-link": ps_jobs.SLOW_LINK,
    "servers": Part(servers, claims_of_servers),
    "table": Part(in_process, claims_of_table),
}

if __name__ == "__main__":
    main("Parameter server", PARTS, PLAN, replace(PLAN, repeats=2, seconds=0.3, least_iterations=1))
