"""Ranks find each other: over memory on a host, over sockets between hosts, and past strangers."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from control_harness import harbour, read_until_closed
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

from argosy.comm import rendezvous, sockets
from argosy.comm.rendezvous import Meeting, meet
from argosy.comm.sockets import HELLO, JoinError
from argosy.control.handshake import CONTROL, PEER, REFUSED, HandshakeError, connect_socket, receive_exactly
from argosy.control.secret import Secret
from argosy.control.store import CoordinatorStore

NONCE_BYTES = 16
SECRET = Secret.new()
Made = Callable[[int], Store]


class FakeEngine:
    """Maps like the real one, by the peer's descriptor and its nonce; keeps the sockets it is given."""

    def __init__(self, unreachable: tuple[int, ...] = ()) -> None:
        self.nonce = os.urandom(NONCE_BYTES)
        self.memory = os.memfd_create("heap")
        os.write(self.memory, self.nonce)
        self.unreachable = unreachable
        self.mapped: list[int] = []
        self.sockets: dict[int, list[socket.socket]] = {}
        self.hosts: list[int] = []
        self.names: list[str] = []

    def card(self) -> tuple[int, int, int, bytes]:
        return os.getpid(), self.memory, NONCE_BYTES, self.nonce

    def map_peer(self, rank: int, pid: int, fd: int, bytes: int, nonce: bytes) -> bool:
        with open(f"/proc/{pid}/fd/{fd}", "rb") as heap:
            same = heap.read(bytes) == nonce
        if not same or rank in self.unreachable:
            return False
        self.mapped.append(rank)
        return True

    def add_sockets(self, rank: int, fds: list[int]) -> None:
        self.sockets[rank] = [socket.socket(fileno=fd) for fd in fds]

    def set_hosts(self, host_numbers: list[int], host_names: list[str]) -> None:
        self.hosts, self.names = host_numbers, host_names

    def close(self) -> None:
        os.close(self.memory)
        for pair in self.sockets.values():
            for sock in pair:
                sock.close()


class Ranks:
    """A group in threads: what `meet` returned or raised on every rank."""

    def __init__(
        self,
        stores: Made,
        host_ids: list[str | None],
        engines: list[FakeEngine] | None = None,
        secrets: list[Secret | None] | None = None,
        absent: tuple[int, ...] = (),
        seconds: float = 10.0,
        per_collective: int = 2,
    ) -> None:
        self.size = len(host_ids)
        self.engines = engines or [FakeEngine() for _ in host_ids]
        self._stores = [stores(rank) for rank in range(self.size)]

        def join(rank: int) -> Meeting | JoinError | None:
            if rank in absent:
                return None
            try:
                return meet(
                    self.engines[rank],
                    self._stores[rank],
                    rank,
                    self.size,
                    secret=secrets[rank] if secrets else SECRET,
                    host_id=host_ids[rank],
                    sockets=per_collective,
                    deadline_seconds=seconds,
                )
            except JoinError as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            begin = time.monotonic()
            self.results = list(pool.map(join, range(self.size), timeout=60))
            self.seconds = time.monotonic() - begin

    def hosts(self) -> tuple[int, ...]:
        """The hosts on which all ranks agree."""
        found = set()
        for result, engine in zip(self.results, self.engines, strict=True):
            assert isinstance(result, Meeting), result
            assert tuple(engine.hosts) == result.hosts
            found.add(result.hosts)
        (hosts,) = found
        return hosts

    def errors(self) -> list[str]:
        return [str(result) for result in self.results if isinstance(result, JoinError)]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def check_sockets(self) -> None:
        """Ranks on different hosts have sockets on which data passes, number by number; others have none."""
        hosts = self.hosts()
        for low in range(self.size):
            for high in range(low + 1, self.size):
                ours, theirs = (self.engines[a].sockets.get(b) for a, b in ((low, high), (high, low)))
                if hosts[low] == hosts[high]:
                    assert ours is None
                    assert theirs is None
                    assert high in self.engines[low].mapped
                    assert low in self.engines[high].mapped
                    continue
                assert ours is not None
                assert theirs is not None
                assert len(ours) == len(theirs) == 4
                for number, (near, far) in enumerate(zip(ours, theirs, strict=True)):
                    assert near.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                    for one, other in ((near, far), (far, near)):
                        one.sendall(b"%d" % number)
                        assert receive_exactly(other, 1, time.monotonic() + 5) == b"%d" % number
                        other.setblocking(False)


@contextmanager
def together(*arguments: object, **more: object) -> Iterator[Ranks]:
    ranks = Ranks(*arguments, **more)  # type: ignore[arg-type]
    try:
        yield ranks
    finally:
        ranks.close()


@pytest.fixture
def hash_store() -> Made:
    store = HashStore()
    return lambda rank: store


@pytest.fixture
def tcp_store() -> Made:
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)

    def client(rank: int) -> Store:
        own = server if rank == 0 else TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=20))
        return PrefixStore("group 1", own)

    return client


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses at which anything has listened."""
    seen: list[str] = []
    real = rendezvous.listen_at

    def listen_at(address: str) -> socket.socket:
        seen.append(address)
        return real(address)

    monkeypatch.setattr(rendezvous, "listen_at", listen_at)
    return seen


def test_one_rank_needs_nobody(hash_store: Made) -> None:
    with together(hash_store, [None]) as ranks:
        assert ranks.hosts() == (0,)
        assert ranks.engines[0].names == [socket.gethostname()]


def test_ranks_of_one_host_share_memory_and_nothing_listens(tcp_store: Made, listening: list[str]) -> None:
    with together(tcp_store, [None] * 4, secrets=[None] * 4) as ranks:
        assert ranks.hosts() == (0, 0, 0, 0)
        assert ranks.engines[0].names == [socket.gethostname()] * 4
        ranks.check_sockets()
    assert listening == []


def test_host_ids_make_hosts_and_sockets_between_them(tcp_store: Made, listening: list[str]) -> None:
    with together(tcp_store, ["left", "right", "left", "right", None]) as ranks:
        assert ranks.hosts() == (0, 1, 0, 1, 2)
        assert ranks.engines[3].names == ["left", "right", "left", "right", socket.gethostname()]
        ranks.check_sockets()
    assert sorted(listening) == ["127.0.0.1"] * 4  # rank 4 has nobody above it


def test_eight_hosts_join_quickly(hash_store: Made) -> None:
    with together(hash_store, list("abcdefgh"), per_collective=2) as ranks:
        ranks.check_sockets()
        assert ranks.seconds < 5.0


def test_the_coordinator_is_a_store_to_meet_at() -> None:
    with harbour() as at:
        clients = [at.client() for _ in range(3)]
        with together(lambda rank: PrefixStore("g", CoordinatorStore(clients[rank])), ["a", "b", "b"]) as ranks:
            assert ranks.hosts() == (0, 1, 1)
            ranks.check_sockets()
        assert clients[0].num_keys() == 0
        for client in clients:
            client.close()


def test_a_store_without_multi_get_will_do(tmp_path: object) -> None:
    with together(lambda rank: FileStore(f"{tmp_path}/store", 2), ["a", "b"]) as ranks:
        ranks.check_sockets()


def test_the_keys_are_removed_and_the_store_serves_again(hash_store: Made) -> None:
    store = hash_store(0)
    for generation in range(3):
        with together(lambda rank, at=generation: PrefixStore(str(at), store), ["a", "b", "b"]) as ranks:
            ranks.check_sockets()
        assert store.num_keys() == 0


@pytest.mark.parametrize(
    ("unreachable", "hosts"),
    [
        ([(), (2,), (), ()], (0, 0, 1, 0)),  # 1 cannot map 2, though 2 can map 1
        ([(), (), (), (0, 1, 2)], (0, 0, 0, 1)),
        ([(1,), (), (3,), ()], (0, 1, 0, 1)),
        ([(1, 2, 3), (2, 3), (3,), ()], (0, 1, 2, 3)),
    ],
)
def test_a_host_is_where_all_pairs_reach_each_other(
    tcp_store: Made, unreachable: list[tuple[int, ...]], hosts: tuple[int, ...]
) -> None:
    with together(tcp_store, [None] * 4, engines=[FakeEngine(ranks) for ranks in unreachable]) as ranks:
        assert ranks.hosts() == hosts
        ranks.check_sockets()


def test_a_rank_that_does_not_come_is_named(hash_store: Made) -> None:
    with together(hash_store, [None] * 4, absent=(3,), seconds=0.5) as ranks:
        assert ranks.errors() == ["rank 3 has not joined within 0.5 s; look into the logs of these workers"] * 3
        assert 0.4 < ranks.seconds < 5.0


def test_a_rank_that_cannot_join_tells_the_others_why(hash_store: Made) -> None:
    broken = FakeEngine()

    def fail(rank: int, pid: int, fd: int, bytes: int, nonce: bytes) -> bool:
        raise JoinError("out of memory")

    broken.map_peer = fail  # type: ignore[method-assign]
    with together(hash_store, [None] * 3, engines=[FakeEngine(), broken, FakeEngine()]) as ranks:
        assert sorted(ranks.errors()) == ["out of memory", *["rank 1 could not join: out of memory"] * 2]
        assert ranks.seconds < 5.0


def test_a_wrong_secret_is_told_on_both_sides(hash_store: Made) -> None:
    with together(hash_store, ["a", "b"], secrets=[SECRET, Secret.new()]) as ranks:
        first, second = ranks.results
        assert "give all workers of a job the same ARGOSY_SECRET" in str(second)
        assert str(first).startswith("rank 1 could not join: rank 1 and rank 0 at 127.0.0.1")
        assert ranks.seconds < 5.0


def test_without_a_secret_only_loopback_is_listened_on(
    hash_store: Made, tcp_store: Made, listening: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with together(hash_store, ["a", "b"], secrets=[None, None]) as ranks:
        ranks.check_sockets()
    assert listening == ["127.0.0.1"]
    listening.clear()
    monkeypatch.setattr(rendezvous, "address_towards", lambda host, port: "10.1.2.3")
    with together(tcp_store, ["a", "b"], secrets=[None, None]) as ranks:
        assert len(ranks.errors()) == 2
        assert all("`argosy secret`" in error and "ARGOSY_SECRET" in error for error in ranks.errors())
    assert listening == []


def test_settings_that_differ_are_told(hash_store: Made) -> None:
    store = hash_store(0)
    engines = [FakeEngine(), FakeEngine()]

    def join(rank: int) -> str:
        with pytest.raises(JoinError) as caught:
            meet(engines[rank], store, rank, 2, secret=SECRET, host_id=None, sockets=rank + 1, deadline_seconds=5)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        for error in pool.map(join, range(2)):
            assert "sockets (in the strategy) must be the same on all workers: rank 0 has 1, rank 1 has 2" in error
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    "card", [b"x" * 5000, b"[]", b"{}", b'{"name": 1}', b"\xff\xfe", b"[" * 4000], ids=lambda card: repr(card[:9])
)
def test_a_card_that_cannot_be_read_is_refused(hash_store: Made, card: bytes) -> None:
    store, engine = hash_store(0), FakeEngine()
    store.set("card/1", card)  # type: ignore[arg-type]
    with pytest.raises(JoinError, match="rank 1 has published a card that cannot be read"):
        meet(engine, store, 0, 2, secret=SECRET, host_id=None, sockets=2, deadline_seconds=5)
    engine.close()


class Crowd:
    """Strangers at the door of rank 0. Its peers come when the strangers say so, and the join must not suffer."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, attack: Callable[[tuple[str, int], threading.Event], None]
    ) -> None:
        self._come, self._trouble = threading.Event(), list[BaseException]()
        self._thread: threading.Thread | None = None
        real_listen, real_make = rendezvous.listen_at, sockets.Introductions.make

        def listen_at(address: str) -> socket.socket:
            listener = real_listen(address)
            if self._thread is None:
                where = (address, listener.getsockname()[1])
                self._thread = threading.Thread(target=self._work, args=(attack, where), daemon=True)
                self._thread.start()
            return listener

        def make(introductions: sockets.Introductions, *arguments: Any) -> dict[int, list[socket.socket]]:
            if introductions._rank:
                assert self._come.wait(20)
            return real_make(introductions, *arguments)

        monkeypatch.setattr(rendezvous, "listen_at", listen_at)
        monkeypatch.setattr(sockets.Introductions, "make", make)

    def _work(self, attack: Callable[[tuple[str, int], threading.Event], None], where: tuple[str, int]) -> None:
        try:
            attack(where, self._come)
        except BaseException as error:
            self._trouble.append(error)
        finally:
            self._come.set()

    def check(self) -> None:
        assert self._thread is not None
        self._thread.join(timeout=20)
        assert not self._thread.is_alive()
        assert not self._trouble, self._trouble


def test_strangers_are_dropped_and_hold_up_nobody(hash_store: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def attack(where: tuple[str, int], come: threading.Event) -> None:
        silent = [socket.create_connection(where, timeout=5) for _ in range(sockets.MAX_STRANGERS + 40)]
        noisy = [socket.create_connection(where, timeout=5) for _ in range(10)]
        for sock in noisy:
            sock.sendall(os.urandom(200))
        come.set()
        for sock in [*silent, *noisy]:
            assert read_until_closed(sock, 10) == b""
            sock.close()

    crowd = Crowd(monkeypatch, attack)
    with together(hash_store, ["a", "b"]) as ranks:
        ranks.check_sockets()
        assert ranks.seconds < sockets.GREETING_SECONDS - 1
    crowd.check()


def test_a_stranger_that_is_silent_too_long_is_dropped(hash_store: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def attack(where: tuple[str, int], come: threading.Event) -> None:
        with socket.create_connection(where, timeout=5) as sock:
            assert read_until_closed(sock, 5) == b""

    monkeypatch.setattr(sockets, "GREETING_SECONDS", 0.3)
    crowd = Crowd(monkeypatch, attack)
    with together(hash_store, ["a", "b"]) as ranks:
        ranks.check_sockets()
    crowd.check()


def test_a_stranger_with_another_secret_is_dropped(hash_store: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def attack(where: tuple[str, int], come: threading.Event) -> None:
        for purpose, secret in ((PEER, Secret.new()), (CONTROL, SECRET)):
            with socket.create_connection(where, timeout=5) as sock, pytest.raises(HandshakeError):
                connect_socket(sock, secret, time.monotonic() + 5, purpose)

    crowd = Crowd(monkeypatch, attack)
    with together(hash_store, ["a", "b"]) as ranks:
        ranks.check_sockets()
    crowd.check()


def test_a_wrong_hello_is_refused(hash_store: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def attack(where: tuple[str, int], come: threading.Event) -> None:
        group = bytes.fromhex(json.loads(hash_store(0).get("card/0"))["group"])
        for hello in (
            HELLO.pack(os.urandom(16), 1, 0, 0),  # another group
            HELLO.pack(group, 1, 2, 0),  # for another rank
            HELLO.pack(group, 7, 0, 0),  # from a rank that is not expected
            HELLO.pack(group, 0, 0, 0),
            HELLO.pack(group, 1, 0, 4),  # a socket too many
        ):
            with socket.create_connection(where, timeout=5) as sock:
                connect_socket(sock, SECRET, time.monotonic() + 5, PEER)
                sock.sendall(hello)
                assert read_until_closed(sock) == REFUSED

    crowd = Crowd(monkeypatch, attack)
    with together(hash_store, ["a", "b"]) as ranks:
        ranks.check_sockets()
    crowd.check()


def test_a_peer_that_has_stopped_listening_is_named(hash_store: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(socket.socket):
        """A listener that gives the address of a port where nobody listens."""

        def getsockname(self) -> Any:
            return silent.getsockname()

    def listen_at(address: str) -> socket.socket:
        silent.bind((address, 0))
        gone = Gone(fileno=real(address).detach())
        gone.setblocking(False)
        return gone

    real = rendezvous.listen_at
    monkeypatch.setattr(rendezvous, "listen_at", listen_at)
    monkeypatch.setattr(sockets, "_REFUSED_SECONDS", 0.2)
    with socket.socket() as silent, together(hash_store, ["a", "b"]) as ranks:
        assert str(ranks.results[1]) == "rank 0 has stopped listening while others joined"
        assert str(ranks.results[0]) == "rank 1 could not join: rank 0 has stopped listening while others joined"
        assert ranks.seconds < 5.0
