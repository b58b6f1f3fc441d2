"""Corners in which a group must not lie, hang or harm: late peers, forks, signals, exits, and life after a failure."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from launching import finish, running
from ranks import Place, run, started

from argosy.comm.errors import CommError, DeadlinePassed, Mismatch, PeerLost

SCRIPTS = Path(__file__).parent / "scripts"


def come_late(place: Place) -> float:
    """A rank that computes for long is not a rank that is lost, however much its peers have sent it meanwhile."""
    group = place.join(timeout_seconds=30)
    tensor, message = torch.ones(4 << 20), torch.ones(4 << 20)
    if place.rank == 1:
        time.sleep(6)
    group.all_reduce(tensor)
    peer = 1 - place.rank
    pending = group.send(message, peer, wait=False)
    if place.rank == 0:
        time.sleep(6)
    group.receive(message, peer)
    pending.wait()
    group.close()
    return tensor[-1].item()


def test_a_late_peer_is_waited_for() -> None:
    assert run(come_late, 2, hosts="ab") == [2.0, 2.0]


def fork_and_wait(place: Place) -> str:
    group = place.join(timeout_seconds=20)
    group.all_reduce(torch.ones(10), wait=False).wait()  # the engine has a thread
    place.store.set(f"works/{place.rank}", "1")
    if place.rank == 1:
        if os.fork() == 0:
            time.sleep(15)
            os._exit(0)
        time.sleep(60)
    try:
        group.all_reduce(torch.ones(10))
    except PeerLost as error:
        return f"{type(error).__name__} {error.rank}"
    return "done"


@pytest.mark.parametrize("hosts", [None, "ab"])
def test_a_forked_child_does_not_hide_its_parents_death(hosts: str | None) -> None:
    with started(fork_and_wait, 2, hosts=hosts) as ranks:
        assert ranks.store is not None
        ranks.store.wait(["works/0", "works/1"])
        time.sleep(0.5)
        ranks.kill(1)
        assert ranks.results(5, ranks=(0,)) == ["PeerLost 1"]


def fork_and_misuse(place: Place) -> tuple[int, bool]:
    group = place.join(timeout_seconds=20)
    group.all_reduce(torch.ones(10), wait=False).wait()
    status = 0
    if place.rank == 1:
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            refused = 0
            for attempt in (lambda: group.all_reduce(torch.ones(10)), lambda: group.send(torch.ones(10), 0)):
                try:
                    attempt()
                except RuntimeError as error:
                    refused += "fork" in str(error)
            group.close()
            group.abort("I am nobody")
            del group
            gc.collect()
            os._exit(refused)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    tensor = torch.ones(10)
    group.all_reduce(tensor)
    group.close()
    return status, bool(tensor.eq(2).all())


@pytest.mark.parametrize("hosts", [None, "ab"])
def test_a_forked_child_cannot_act_as_its_parent(hosts: str | None) -> None:
    assert run(fork_and_misuse, 2, hosts=hosts) == [(0, True), (2, True)]


def come_back_from_a_stop(place: Place) -> list[float]:
    """After a failure the tensors are this process's own: whoever was stopped cannot write into them later."""
    group = place.join(timeout_seconds=2 if place.rank == 0 else 30)
    tensor = group.empty(1 << 24).fill_(1)
    group.barrier()
    if place.rank == 1:
        time.sleep(4)  # as if it were stopped: it comes when rank 0 has given up
    try:
        group.all_reduce(tensor)
    except CommError:
        tensor.fill_(7)
        time.sleep(4 if place.rank == 0 else 0)
    return tensor.unique().tolist()


def test_nobody_writes_into_the_tensors_of_a_broken_group() -> None:
    assert run(come_back_from_a_stop, 2)[0] == [7.0]


def interrupt_messages(place: Place) -> str:
    group = place.join(timeout_seconds=30)
    if place.rank == 1:
        with pytest.raises(CommError) as caught:
            group.receive(torch.zeros(10), 0, 3)
        return str(caught.value)
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    pending = [group.receive(torch.zeros(10), 1, tag, wait=False) for tag in (1, 2)]
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
        pending[0].wait()
    with pytest.raises(CommError):
        pending[1].wait()
    with pytest.raises(CommError):
        group.barrier()
    return "interrupted"


@pytest.mark.parametrize("hosts", [None, "ab"])
def test_a_signal_in_a_wait_for_a_message_breaks_the_group_and_is_told(hosts: str | None) -> None:
    first, second = run(interrupt_messages, 2, hosts=hosts)
    assert first == "interrupted"
    assert "interrupted" in second


def drop_everything(place: Place) -> bool:
    """Operations that nobody holds any more go on with their tensors, and a group that is dropped harms nobody."""
    for number in range(20):
        group = place.join(f"group {number}")
        pending = [group.all_reduce(torch.ones(100_000), wait=False) for _ in range(3)]
        del pending
        if number % 2:
            group.all_reduce(torch.ones(3))
            group.close()
        del group
        gc.collect()
    return True


def test_operations_and_groups_may_be_dropped() -> None:
    assert run(drop_everything, 2) == [True, True]


def send_and_close(place: Place) -> float:
    group = place.join()
    tensor = torch.full((4 << 20,), float(place.rank))
    if place.rank == 0:
        group.send(tensor, 1, wait=False)
        group.close()
        with pytest.raises(CommError, match="closed"):
            group.all_reduce(tensor, wait=False)
        return 0.0
    time.sleep(0.5)
    group.receive(tensor, 0)
    group.close()
    return tensor[-1].item()


@pytest.mark.parametrize("hosts", [None, "ab"])
def test_closing_waits_for_messages_that_were_sent(hosts: str | None) -> None:
    assert run(send_and_close, 2, hosts=hosts) == [0.0, 0.0]


def splits_differ(place: Place, sent: int, expected: int) -> str:
    group = place.join(timeout_seconds=15)
    splits = ([2, sent], [2, 2]) if place.rank == 0 else ([2, 2], [expected, 2])
    out = torch.zeros(sum(splits[1]))
    with pytest.raises(CommError) as caught:
        group.all_to_all(out, torch.zeros(sum(splits[0])), splits[1], splits[0])
    return f"{type(caught.value).__name__} {caught.value}"


@pytest.mark.parametrize("hosts", [None, "ab"])
@pytest.mark.parametrize(("sent", "expected"), [(5, 0), (0, 5), (7, 5)])
def test_splits_that_differ_are_named(hosts: str | None, sent: int, expected: int) -> None:
    for told in run(splits_differ, 2, sent, expected, hosts=hosts):
        assert told.startswith("Mismatch")
        assert f"rank 0 sends {4 * sent} bytes to rank 1, which expects {4 * expected}" in told


def wrong_size_that_came_early(place: Place) -> str:
    group = place.join(timeout_seconds=15)
    if place.rank == 0:
        group.send(torch.zeros(4), 1)
        group.send(torch.zeros(4), 1, tag=2)
        with pytest.raises(Mismatch) as caught:
            group.receive(torch.zeros(1), 1)
    else:
        group.receive(torch.zeros(4), 0, tag=2)  # the first message is there by now
        with pytest.raises(Mismatch) as caught:
            group.receive(torch.zeros(5), 0)
    return str(caught.value)


@pytest.mark.parametrize("hosts", [None, "ab"])
def test_a_message_of_another_size_is_a_mismatch_also_if_it_came_early(hosts: str | None) -> None:
    for told in run(wrong_size_that_came_early, 2, hosts=hosts):
        assert "message of 16 bytes of f32" in told
        assert "message of 20 bytes of f32" in told


def large_and_unexpected(place: Place) -> bool:
    group = place.join()
    if place.rank == 0:
        pending = group.send(torch.ones(72 << 20), 1, tag=1, wait=False)
        group.send(torch.full((3,), 2.0), 1, tag=2)
        pending.wait()
        group.close()
        return True
    small, large = torch.zeros(3), torch.zeros(72 << 20)
    group.receive(small, 0, tag=2)
    group.receive(large, 0, tag=1)
    group.close()
    return bool(small.eq(2).all() and large.eq(1).all())


def test_a_large_message_that_nobody_asks_for_yet_is_not_in_the_way() -> None:
    assert run(large_and_unexpected, 2) == [True, True]


def stopped_in_a_message(place: Place) -> str:
    group = place.join(timeout_seconds=2)
    place.store.set(f"works/{place.rank}", "1")
    if place.rank == 1:
        time.sleep(60)
    time.sleep(0.5)
    with pytest.raises(DeadlinePassed) as caught:
        group.receive(torch.zeros(3), 1)
    return f"{caught.value.rank} {caught.value}"


def test_a_stopped_sender_is_named() -> None:
    with started(stopped_in_a_message, 2) as ranks:
        assert ranks.store is not None
        ranks.store.wait(["works/0", "works/1"])
        ranks.kill(1, signal.SIGSTOP)
        (told,) = ranks.results(10, ranks=(0,))
        ranks.kill(1, signal.SIGCONT)
    assert told.startswith("1 ")
    assert "stopped" in told


def average_halves(place: Place) -> list[float]:
    group = place.join()
    tensor = torch.full((5,), 40_000.0, dtype=torch.float16)
    group.all_reduce(tensor, "avg")
    part = torch.empty(1, dtype=torch.float16)
    group.reduce_scatter(part, torch.full((2,), 40_000.0, dtype=torch.float16), "avg")
    group.close()
    return [tensor[0].item(), part[0].item()]


@pytest.mark.parametrize("hosts", [None, "ab"])
def test_an_average_does_not_overflow_where_its_sum_would(hosts: str | None) -> None:
    assert run(average_halves, 2, hosts=hosts) == [[40_000.0, 40_000.0]] * 2


@pytest.mark.parametrize("how", ["future", "thread", "receive"])
def test_a_script_that_ends_while_a_thread_waits_ends_with_its_own_status(how: str, tmp_path: Path) -> None:
    """The interpreter ends while a thread is inside the engine: that must not become an abort."""
    script = SCRIPTS / "exit_while_waiting.py"
    first, second = ([sys.executable, script, rank, tmp_path / "store", how] for rank in "01")
    with running(first) as failing, running(second) as other:
        ends = [finish(process, deadline_seconds=30) for process in (failing, other)]
    assert ends[0].status == 1, ends[0].err
    assert "ValueError: the cargo has shifted" in ends[0].err
    assert ends[1].status == 0, ends[1].err
