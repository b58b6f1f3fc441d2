"""Each operation of the coordinator, through the client, alone and from many threads."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from control_harness import Harbour, eventually, harbour

from argosy.control import wire
from argosy.control.client import Client, CoordinatorError, CoordinatorLost, DeadlineExceeded
from argosy.control.coordinator import Coordinator
from argosy.control.secret import Secret

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(scope="module")
def shared() -> Iterator[Harbour]:
    with harbour() as at:
        yield at


@pytest.fixture
def at(shared: Harbour) -> Iterator[Harbour]:
    yield shared
    # Each test leaves the coordinator as it found it: nobody connected, nobody waiting.
    eventually(lambda: shared.connections() == 0)
    assert shared.ask(lambda: len(shared.coordinator._barriers)) == 0
    assert shared.ask(lambda: len(shared.coordinator._table._watches)) == 0
    shared.ask(lambda: [shared.coordinator._table.delete(key) for key in list(shared.coordinator._table._values)])


@pytest.fixture
def client(at: Harbour) -> Iterator[Client]:
    with at.client(who="rank 0") as client:
        yield client


def in_thread(work, *arguments):  # type: ignore[no-untyped-def]
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work, *arguments)
    pool.shutdown(wait=False)
    return future


def arrivals(at: Harbour, name: str) -> int:
    barriers = at.coordinator._barriers._open
    return at.ask(lambda: len(barriers[name].arrivals) if name in barriers else 0)


def test_set_get_any_bytes(client: Client) -> None:
    for value in (b"", b"x", bytes(range(256)), os.urandom(3 * 2**20)):
        client.set("key", value)
        assert client.get("key") == value
    client.set("ключ/\n\0'", b"v")
    assert client.get("ключ/\n\0'") == b"v"


def test_get_waits_for_a_key(client: Client) -> None:
    waiting = in_thread(client.get, "later")
    time.sleep(0.05)
    assert not waiting.done()
    client.set("later", b"now")
    assert waiting.result(5) == b"now"


def test_get_names_key_and_seconds_at_its_deadline(client: Client) -> None:
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"waited 0.1 s for key 'never', which nobody set"):
        client.get("never", timeout_seconds=0.1)
    assert 0.09 < time.monotonic() - begin < 2.0
    with pytest.raises(TimeoutError):
        client.get("never", timeout_seconds=0)
    assert client.num_keys() == 0


def test_add(client: Client) -> None:
    assert [client.add("n", 2), client.add("n", 3), client.add("n", -10)] == [2, 5, -5]
    assert client.get("n") == b"-5"
    client.set("text", b"abc")
    with pytest.raises(CoordinatorError, match="'text' does not hold an integer") as caught:
        client.add("text", 1)
    assert caught.value.kind == "not-integer"


def test_wait_and_check(client: Client) -> None:
    client.set("a", b"")
    assert client.check(["a"])
    assert client.check([])
    assert not client.check(["a", "b"])
    client.wait(["a"])
    client.wait([])
    with pytest.raises(DeadlineExceeded, match=r"waited 0.05 s for 3 keys; nobody set 2 of them: 'b', 'c'"):
        client.wait(["a", "c", "b"], timeout_seconds=0.05)
    waiting = in_thread(client.wait, ["a", "b", "c"])
    client.set("c", b"")
    time.sleep(0.02)
    assert not waiting.done()
    client.set("b", b"")
    waiting.result(5)


def test_a_missed_wait_shows_only_the_first_keys(client: Client) -> None:
    with pytest.raises(DeadlineExceeded, match=r"nobody set 1000 of them: .* and 992 more"):
        client.wait([f"key {index:04}" for index in range(1000)], timeout_seconds=0)


def test_compare_set_is_torchs(client: Client) -> None:
    assert client.compare_set("k", b"old", b"new") == b"old"
    assert not client.check(["k"])
    assert client.compare_set("k", b"", b"first") == b"first"
    assert client.compare_set("k", b"", b"second") == b"first"
    assert client.compare_set("k", b"first", b"second") == b"second"
    assert client.get("k") == b"second"


def test_delete_num_keys_append(client: Client) -> None:
    assert client.num_keys() == 0
    client.append("list", b"a")
    client.append("list", b"b")
    assert client.get("list") == b"ab"
    assert client.num_keys() == 1
    assert client.delete("list")
    assert not client.delete("list")
    assert client.num_keys() == 0


def test_multi_get_and_set(client: Client) -> None:
    client.multi_set(["a", "b"], [b"1", b"2"])
    assert client.multi_get(["b", "a", "b"]) == [b"2", b"1", b"2"]
    assert client.multi_get([]) == []
    waiting = in_thread(client.multi_get, ["a", "c"])
    client.set("c", b"3")
    assert waiting.result(5) == [b"1", b"3"]
    with pytest.raises(CoordinatorError, match="as long as keys"):
        client.multi_set(["a", "b"], [b"1"])
    client.set("large", bytes(2**20))
    with pytest.raises(CoordinatorError, match="do not fit into one message") as caught:
        client.multi_get(["large"] * 20)
    assert caught.value.kind == "too-large"


def test_a_value_too_large_for_a_message_is_refused(client: Client) -> None:
    with pytest.raises(CoordinatorError, match="at most 16777216 are allowed"):
        client.set("k", bytes(13 * 2**20))
    client.set("k", bytes(12 * 2**20 - 100))
    assert len(client.get("k")) == 12 * 2**20 - 100
    client.append("k", bytes(2**20))
    with pytest.raises(CoordinatorError, match="the reply is a message of") as caught:
        client.get("k")
    assert caught.value.kind == "too-large"
    assert client.num_keys() == 1


@pytest.mark.parametrize("key", ["", "x" * 4097, "\ud800"])
def test_keys_that_are_none(client: Client, key: str) -> None:
    with pytest.raises(CoordinatorError, match="key") as caught:
        client.set(key, b"")
    assert caught.value.kind == "bad-request"
    assert client.num_keys() == 0


def test_a_waiting_call_does_not_hold_up_others(client: Client) -> None:
    waiting = [in_thread(client.get, f"later {index}") for index in range(10)]
    for _ in range(20):
        client.add("n", 1)
    for index in range(10):
        client.set(f"later {index}", b"%d" % index)
    assert [each.result(5) for each in waiting] == [b"%d" % index for index in range(10)]


def test_many_threads_count_to_the_same_number(at: Harbour, client: Client) -> None:
    with ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(lambda _: client.add("n", 1), range(400)))
    assert sorted(sums) == list(range(1, 401))
    with ThreadPoolExecutor(8) as pool:
        winners = list(pool.map(lambda rank: client.compare_set("leader", b"", b"%d" % rank), range(64)))
    assert len(set(winners)) == 1
    assert at.connections() <= 8


def test_barrier_again_and_again(at: Harbour) -> None:
    """Nobody leaves a round before all came to it, however quickly the quick ones come back."""
    size, rounds = 4, 25
    counts = [0] * size

    def take_part(rank: int) -> None:
        with at.client(who=f"rank {rank}") as client:
            for _ in range(rounds):
                counts[rank] += 1
                client.barrier("round", size)
                assert min(counts) >= counts[rank]
                client.barrier("round", size)

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(take_part, range(size)))


def test_barrier_deadline_names_who_came(at: Harbour) -> None:
    clients = [at.client(who=f"rank {rank}") for rank in (0, 1, 3)]
    waiting = [in_thread(client.barrier, "start", 4, 5.0) for client in clients[:2]]
    eventually(lambda: arrivals(at, "start") == 2)
    with pytest.raises(DeadlineExceeded) as caught:
        clients[2].barrier("start", 4, timeout_seconds=0.1)
    message = str(caught.value)
    assert message.startswith("barrier 'start' waited 0.1 s: 3 of 4 arrived (")
    assert all(name in message for name in ("rank 0", "rank 1", "rank 3"))
    # Who gave up does not count any more: two are missing again, and two complete it.
    late = [in_thread(clients[2].barrier, "start", 4, 5.0) for _ in range(2)]
    for each in waiting + late:
        each.result(5)
    for client in clients:
        client.close()


def test_barrier_sizes_must_agree(at: Harbour, client: Client) -> None:
    with at.client(who="rank 1") as other:
        waiting = in_thread(client.barrier, "b", 2)
        eventually(lambda: arrivals(at, "b") == 1)
        with pytest.raises(CoordinatorError, match="rank 1 came for 3 participants, rank 0 for 2"):
            other.barrier("b", 3)
        other.barrier("b", 2)
        waiting.result(5)
    client.barrier("alone", 1)
    with pytest.raises(CoordinatorError, match="size must be at least 1"):
        client.barrier("b", 0)


def test_barrier_forgets_who_went_away(at: Harbour, client: Client) -> None:
    leaver = at.client(who="leaver")
    waiting = in_thread(leaver.barrier, "b", 2)
    eventually(lambda: arrivals(at, "b") == 1)
    leaver.close()
    with pytest.raises(CoordinatorLost):
        waiting.result(5)
    eventually(lambda: arrivals(at, "b") == 0)
    with pytest.raises(DeadlineExceeded, match=r"1 of 2 arrived \(rank 0\)"):
        client.barrier("b", 2, timeout_seconds=0.05)


def test_a_will_is_carried_out_when_its_maker_goes(at: Harbour, client: Client) -> None:
    maker = at.client()
    maker.will("lost/node 1", b"node 1 is gone")
    waiting = in_thread(client.get, "lost/node 1")
    time.sleep(0.05)
    assert not waiting.done()
    maker.close()
    assert waiting.result(5) == b"node 1 is gone"


def test_a_will_withdrawn_or_overtaken_changes_nothing(at: Harbour, client: Client) -> None:
    with at.client() as maker:
        will = maker.will("a", b"will")
        maker.will("b", b"will")
        will.withdraw()
        will.withdraw()
        client.set("b", b"live")
        assert not client.check(["a"])
    eventually(lambda: at.connections() == 1)
    assert not client.check(["a"])
    assert client.get("b") == b"live"
    assert client.num_keys() == 1
    assert at.ask(lambda: at.coordinator._table._reserved_keys) == 0


def test_close_unblocks_calls_and_ends_the_client(at: Harbour) -> None:
    client = at.client()
    waiting = [in_thread(client.get, "never"), in_thread(client.barrier, "never", 2)]
    eventually(lambda: at.connections() == 2)
    client.close()
    for each in waiting:
        with pytest.raises(CoordinatorLost, match=r"client (is|was) closed"):
            each.result(5)
    with pytest.raises(CoordinatorLost, match="closed"):
        client.num_keys()
    client.close()


def test_calls_that_wait_end_when_the_coordinator_stops() -> None:
    with harbour() as at:
        client = at.client()
        will = client.will("k", b"v")
        waiting = in_thread(client.get, "never")
        eventually(lambda: at.connections() == 2)
        at.run(at.coordinator.stop())
        with pytest.raises(CoordinatorLost, match=f"lost the coordinator at {at.address} during get"):
            waiting.result(5)
        with pytest.raises(CoordinatorLost):
            will.withdraw()
        client.close()


def test_both_ends_of_a_connection_are_tuned(at: Harbour, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[int] = []
    tune = wire.tune_socket

    def spy(sock: socket.socket) -> None:
        tune(sock)
        tuned.append(sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))

    monkeypatch.setattr(wire, "tune_socket", spy)
    client.num_keys()
    assert tuned == [1, 1]


def test_stop_leaves_no_task_and_no_descriptor() -> None:
    def descriptors() -> set[str]:
        return set(os.listdir("/proc/self/fd"))

    async def scenario() -> None:
        before = descriptors()
        coordinator = await Coordinator.start(Secret.new())
        clients = [Client(coordinator.address, coordinator.secret) for _ in range(3)]
        waits = [threading.Thread(target=_ignore_loss, args=(client,)) for client in clients]
        for thread in waits:
            thread.start()
        silent = await asyncio.open_connection(*coordinator.address.split(":"))
        while coordinator._connections < 3 or not coordinator._pending:
            await asyncio.sleep(0.005)
        await coordinator.stop()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await coordinator.stop()
        silent[1].close()
        for thread in waits:
            await asyncio.to_thread(thread.join, 5.0)
        for client in clients:
            client.close()
        await asyncio.sleep(0.01)
        assert descriptors() == before

    asyncio.run(scenario())


def _ignore_loss(client: Client) -> None:
    with pytest.raises(CoordinatorLost):
        client.get("never")


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_beyond_loopback_needs_a_secret(host: str) -> None:
    with pytest.raises(ValueError, match=r"beyond loopback, without a secret: .*--secret-file"):
        asyncio.run(Coordinator.start(None, host=host))


def test_where_it_listens() -> None:
    async def scenario() -> None:
        secret = Secret.new()
        coordinator = await Coordinator.start(secret, host="0.0.0.0")
        assert coordinator.address.startswith("0.0.0.0:")
        assert coordinator.secret == secret
        port = int(coordinator.address.rpartition(":")[2])
        await coordinator.stop()
        for host in ("localhost", "127.0.0.1"):
            coordinator = await Coordinator.start(None, host=host, port=port)
            with Client(coordinator.address, coordinator.secret) as client:
                assert await asyncio.to_thread(client.num_keys) == 0
            with pytest.raises(OSError, match="in use"):
                await Coordinator.start(None, host=host, port=port)
            await coordinator.stop()

    asyncio.run(scenario())
