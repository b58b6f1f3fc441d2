"""A peer that dies, stops, leaves, is cut off or does something else: the others say who, where, in what, and soon."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from namespaces import ADDRESSES, ip, two_hosts
from ranks import Failed, Place, Ranks, run, started

from argosy.comm.engine import EngineGroup
from argosy.comm.errors import CommError, PeerLost

SAME_HOST_SECONDS, ACROSS_SECONDS = 1.0, 5.0


def reduce_for_ever(group: EngineGroup, shared: bool = False) -> None:
    tensor = group.empty(300_000) if shared else torch.zeros(300_000)
    while True:
        group.all_reduce(tensor)


def receive_from_last(group: EngineGroup) -> None:
    if group.rank == group.size - 1:
        time.sleep(60)
    group.receive(torch.zeros(10), group.size - 1)


def receive_from_anybody(group: EngineGroup) -> None:
    if group.rank == group.size - 1:
        time.sleep(60)
    group.receive(torch.zeros(10), None)


def start_and_wait(group: EngineGroup) -> None:
    while True:
        pending = [group.all_reduce(torch.zeros(1000), wait=False) for _ in range(5)]
        time.sleep(0.01)
        for one in pending:
            one.wait()


def gather_for_ever(group: EngineGroup) -> None:
    while True:
        group.all_gather(torch.zeros(1000))


WORK: dict[str, Callable[[EngineGroup], None]] = {
    "all_reduce": reduce_for_ever,
    "shared all_reduce": lambda group: reduce_for_ever(group, shared=True),
    "all_gather": gather_for_ever,
    "started all_reduce": start_and_wait,
    "receive": receive_from_last,
    "receive from anybody": receive_from_anybody,
}


def work(place: Place, kind: str, timeout_seconds: float) -> None:
    group = place.join(timeout_seconds=timeout_seconds)
    place.store.set(f"works/{place.rank}", "1")
    WORK[kind](group)


def wait_until_all_work(ranks: Ranks, size: int, store: Any) -> None:
    store.wait([f"works/{rank}" for rank in range(size)])
    time.sleep(0.1)


@pytest.mark.parametrize("kind", WORK)
@pytest.mark.parametrize(("hosts", "limit"), [(None, SAME_HOST_SECONDS), ("aab", ACROSS_SECONDS)])
def test_a_killed_peer_is_named_at_once(kind: str, hosts: str | None, limit: float) -> None:
    with started(work, 3, kind, 30.0, hosts=hosts) as ranks:
        wait_until_all_work(ranks, 3, ranks.store)
        killed = ranks.kill(2)
        survivors = ranks.results(10, ranks=(0, 1))
    for rank, failure in enumerate(survivors):
        assert failure.kind == "PeerLost", failure
        assert failure.at - killed < limit
        assert failure.told["rank"] == 2
        assert failure.told["host"] == ("b" if hosts else os.uname().nodename)
        assert failure.told["operation"].split()[0] == kind.split()[-1 if "all" in kind else 0]
        assert failure.told["sequence"] >= (0 if "receive" in kind else 1)
        assert f"failed on rank {rank} of 3" in failure.message


@pytest.mark.parametrize("hosts", [None, "aab", "aba"])
def test_a_stopped_peer_is_named_when_the_deadline_passes(hosts: str | None) -> None:
    with started(work, 3, "all_reduce", 4.0, hosts=hosts) as ranks:
        wait_until_all_work(ranks, 3, ranks.store)
        stopped = ranks.kill(2, signal.SIGSTOP)
        survivors = ranks.results(20, ranks=(0, 1))
        ranks.kill(2, signal.SIGCONT)
    for failure in survivors:
        assert failure.kind == "DeadlinePassed", failure
        assert failure.told["rank"] == 2, failure
        assert "stopped" in failure.message
        assert 3.5 < failure.at - stopped < 8


def lose_patience_in_turn(place: Place, algorithm: str, first: int) -> None:
    group = place.join(timeout_seconds=4.0 if place.rank == first else 15.0, algorithm=algorithm)
    place.store.set(f"works/{place.rank}", "1")
    reduce_for_ever(group)


@pytest.mark.parametrize(
    ("algorithm", "first", "stopped"),
    [("hierarchical", 0, 2), ("hierarchical", 1, 2), ("ring", 0, 1), ("ring", 0, 2), ("ring", 1, 2)],
)
def test_who_waits_for_the_stopped_peer_too_is_not_blamed(algorithm: str, first: int, stopped: int) -> None:
    with started(lose_patience_in_turn, 3, algorithm, first, hosts="aab") as ranks:
        wait_until_all_work(ranks, 3, ranks.store)
        ranks.kill(stopped, signal.SIGSTOP)
        survivors = ranks.results(20, ranks=[rank for rank in range(3) if rank != stopped])
        ranks.kill(stopped, signal.SIGCONT)
    assert [failure.told["rank"] for failure in survivors] == [stopped] * 2, survivors


def test_a_cut_link_is_noticed() -> None:
    with two_hosts() as names:
        where = [names[0], names[0], names[1]]
        options = {"hosts": where, "namespaces": where, "store_at": f"{ADDRESSES[0]}:29610"}
        with started(work, 3, "all_reduce", 60.0, **options) as ranks:
            time.sleep(3)
            ip("-n", names[0], "link", "set", "wire0", "down")
            cut = time.monotonic()
            results = ranks.results(20)
    for rank, failure in enumerate(results):
        assert isinstance(failure, Failed)
        assert failure.kind == "PeerLost", failure
        assert failure.at - cut < ACROSS_SECONDS + 0.5
        assert failure.told["rank"] == (2 if rank < 2 else failure.told["rank"])
        assert failure.told["host"] == (names[1] if rank < 2 else names[0])


def leave_early(place: Place) -> str:
    group = place.join()
    group.all_reduce(torch.zeros(10))
    if place.rank == 1:
        group.close()
        time.sleep(3)
        return ""
    with pytest.raises(PeerLost) as caught:
        group.all_reduce(torch.zeros(10))
    assert caught.value.rank == 1
    with pytest.raises(CommError):  # it stays broken, and says the same
        group.barrier()
    return str(caught.value)


@pytest.mark.parametrize("hosts", [None, "ab"])
def test_a_peer_that_has_left_is_not_waited_for(hosts: str | None) -> None:
    told = run(leave_early, 2, hosts=hosts)[0]
    assert "rank 1 has left the group" in told


def abort_while_others_wait(place: Place) -> str:
    group = place.join()
    if place.rank == 0:
        time.sleep(0.3)
        group.abort("no more coal")
        return ""
    with pytest.raises(CommError) as caught:
        group.all_reduce(torch.zeros(10))
    return str(caught.value)


@pytest.mark.parametrize("hosts", [None, "aab"])
def test_an_aborted_group_fails_everywhere(hosts: str | None) -> None:
    for told in run(abort_while_others_wait, 3, hosts=hosts)[1:]:
        assert "rank 0 aborted the group: no more coal" in told


MISMATCHES: dict[str, tuple[Callable[[EngineGroup], Any], Callable[[EngineGroup], Any], str, str]] = {
    "operation": (
        lambda group: group.all_reduce(torch.zeros(10)),
        lambda group: group.broadcast(torch.zeros(10)),
        "all_reduce (sum) of 10 f32",
        "broadcast of 10 f32, root 0",
    ),
    "size": (
        lambda group: group.all_reduce(torch.zeros(100_000)),
        lambda group: group.all_reduce(torch.zeros(100_001)),
        "of 100000 f32",
        "of 100001 f32",
    ),
    "type": (
        lambda group: group.all_reduce(torch.zeros(10)),
        lambda group: group.all_reduce(torch.zeros(10, dtype=torch.int32)),
        "of 10 f32",
        "of 10 i32",
    ),
    "kind of sum": (
        lambda group: group.all_reduce(torch.zeros(10)),
        lambda group: group.all_reduce(torch.zeros(10), "max"),
        "all_reduce (sum)",
        "all_reduce (max)",
    ),
    "root": (
        lambda group: group.reduce(torch.zeros(10), 0),
        lambda group: group.reduce(torch.zeros(10), 1),
        "root 0",
        "root 1",
    ),
}


def differ(place: Place, name: str) -> str:
    first, second, *_ = MISMATCHES[name]
    group = place.join(timeout_seconds=15)
    call = first if place.rank == 0 else second

    def call_and_meet() -> None:
        call(group)
        group.barrier()  # one that only sends may be done before its peer sees what it has sent

    began = time.monotonic()
    with pytest.raises(CommError) as caught:
        call_and_meet()
    assert time.monotonic() - began < 10
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("name", MISMATCHES)
@pytest.mark.parametrize("hosts", [None, "ab"])
def test_ranks_that_differ_are_both_named(name: str, hosts: str | None) -> None:
    for told in run(differ, 2, name, hosts=hosts):
        assert told.startswith("Mismatch")
        assert MISMATCHES[name][2] in told
        assert MISMATCHES[name][3] in told
        assert "rank 0" in told
        assert "rank 1" in told


def wait_for_a_signal(place: Place) -> str:
    group = place.join(timeout_seconds=30)
    if place.rank == 1:
        time.sleep(60)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    place.store.set("works/0", "1")
    try:
        group.all_reduce(torch.zeros(10))
    except KeyboardInterrupt:
        return "interrupted"
    return "done"


def test_a_signal_ends_a_wait() -> None:
    with started(wait_for_a_signal, 2) as ranks:
        wait_until_all_work(ranks, 1, ranks.store)
        ranks.kill(0, signal.SIGINT)
        assert ranks.results(5, ranks=(0,)) == ["interrupted"]


WORLD, WORLDS = 8, 29  # 7 kills in each


def outlive(place: Place, seed: int) -> list[int]:
    """Work in ever smaller groups: whoever is lost, the others go on without it."""
    alive, lost = list(range(place.size)), []
    while len(alive) > 1:
        group = place.join(f"after {len(lost)}", ranks=alive)
        place.store.set(f"works/{len(lost)}/{place.rank}", "1")
        choose = random.Random(f"{seed} {len(lost)}")
        tensors = [group.empty(10), group.empty(20_000), torch.zeros(11), torch.zeros(90_000)]
        try:
            while True:
                tensor = choose.choice(tensors).zero_()
                kind = choose.randrange(4)
                if kind == 0:
                    group.all_reduce(tensor)
                elif kind == 1:
                    group.all_reduce(tensor, wait=False).wait()
                elif kind == 2:
                    group.broadcast(tensor, choose.randrange(len(alive)))
                else:
                    group.all_gather(tensor)
        except PeerLost as error:
            lost.append(alive.pop(error.rank))
        group.close()
    return lost


def test_two_hundred_random_kills() -> None:
    """No hang, the right rank named each time, and nothing left behind."""
    before = set(Path("/dev/shm").iterdir())
    kills = 0
    for seed in range(WORLDS):
        choose = random.Random(seed)
        order = choose.sample(range(WORLD), WORLD)
        hosts = ["ab"[rank * 2 // WORLD] for rank in range(WORLD)] if seed % 5 == 4 else None
        with started(outlive, WORLD, seed, hosts=hosts) as ranks:
            alive = list(range(WORLD))
            for number, victim in enumerate(order[:-1]):
                ranks.store.wait([f"works/{number}/{rank}" for rank in alive])
                time.sleep(choose.uniform(0, 0.02))
                ranks.kill(victim)
                alive.remove(victim)
                kills += 1
            assert ranks.results(20, ranks=order[-1:]) == [order[:-1]], f"seed {seed}"
    assert kills >= 200
    assert set(Path("/dev/shm").iterdir()) == before
    assert not [link for link in _open_files() if "memfd:argosy" in link]


def _open_files() -> list[str]:
    """Those of this process and its descendants: other jobs on the machine have theirs."""
    links = []
    for pid in _family():
        for path in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                links.append(os.readlink(path))
    return links


def _family() -> set[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family
