"""What links and programs do when a peer is gone, disagrees, gives up or sends what no peer would."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from frames_harness import ABORT, BEAT, DATA, MAX_PAYLOAD, frame, head
from links_harness import (
    DEADLINE_SECONDS,
    OPERATION,
    Kind,
    World,
    in_threads,
    located,
)

from argosy import _native
from argosy.comm.algorithms import ring, tree
from argosy.comm.schedule import COPY, SEND
from argosy.comm.schedule import Step as ScheduleStep
from argosy.comm.topology import Topology

COUNT, SEQUENCE = 1000, 7


class Peer:
    """Rank 0's links to a rank 1 that this test plays by hand, over raw sockets."""

    def __init__(self, lanes: int = 1) -> None:
        pairs = [socket.socketpair() for _ in range(lanes)]
        self.sockets = [ours for ours, _ in pairs]
        self.links = _native.Links(0, 2)
        self.links.add_tcp(1, [theirs.detach() for _, theirs in pairs])
        self.buffer = np.zeros(COUNT, np.float32)

    def receive(self, seconds: float = DEADLINE_SECONDS, kind: int = COPY, chunk_bytes: int = 1024) -> None:
        steps = located([ScheduleStep(kind, 1, 0, 1)], self.buffer, 1)
        self.links.run(steps, SEQUENCE, OPERATION, COUNT, "f32", "sum", seconds, chunk_bytes)

    def fail(self, seconds: float = DEADLINE_SECONDS) -> _native.Failure:
        with pytest.raises(_native.Failure) as caught:
            self.receive(seconds)
        return caught.value

    def close(self) -> None:
        self.links.close()
        for end in self.sockets:
            end.close()


@pytest.fixture
def peer() -> Peer:
    return Peer()


def chunk(offset: int, size: int, byte: int = 0, **fields: int) -> bytes:
    common = {"sequence": SEQUENCE, "operation": OPERATION, "count": COUNT, "from": 1, "offset": offset}
    return frame(bytes([byte]) * size, **common | fields)


WHOLE = [(0, 1024), (1024, 1024), (2048, 1024), (3072, 928)]


def test_frames_arrive_in_pieces_of_a_byte(peer: Peer) -> None:
    data = b"".join(chunk(offset, size, 1) for offset, size in WHOLE)

    def trickle() -> None:
        for position in range(len(data)):
            peer.sockets[0].send(data[position : position + 1])

    assert in_threads(trickle, peer.receive) == [None, None]
    assert peer.buffer.tobytes() == b"\1" * 4000
    peer.close()


def test_chunks_may_come_in_any_order_on_any_lane() -> None:
    peer = Peer(lanes=3)
    for number, (offset, size) in enumerate(reversed(WHOLE)):
        peer.sockets[number % 3].send(chunk(offset, size, number) + head(type=BEAT, **{"from": 1}))
    peer.receive()
    assert peer.buffer.tobytes() == b"\3" * 1024 + b"\2" * 1024 + b"\1" * 1024 + b"\0" * 928
    peer.close()


def test_a_peer_that_closes_is_lost(peer: Peer) -> None:
    peer.sockets[0].send(chunk(0, 1024))
    peer.sockets[0].close()
    failure = peer.fail()
    assert (failure.kind, failure.peer) == ("lost", 1)
    assert str(failure) == "rank 1 is lost: it closed the connection"


def test_a_peer_that_closes_in_the_middle_of_a_frame_is_lost(peer: Peer) -> None:
    for cut in (10, 100):
        peer = Peer()
        peer.sockets[0].send(chunk(0, 1024)[:cut])
        peer.sockets[0].close()
        assert str(peer.fail()) == "rank 1 is lost: it closed the connection, in the middle of a frame"


def test_what_was_sent_before_closing_is_received() -> None:
    peer = Peer(lanes=2)
    peer.sockets[1].close()
    peer.sockets[0].send(b"".join(chunk(offset, size, 1) for offset, size in WHOLE))
    peer.sockets[0].close()
    peer.receive()
    assert peer.buffer.tobytes() == b"\1" * 4000


def test_a_sender_notices_that_its_peer_is_gone() -> None:
    for lanes in (1, 2):
        peer = Peer(lanes)
        big = np.zeros(1 << 20, np.float32)
        steps = located([ScheduleStep(SEND, 1, 0, 1)], big, 1)
        timer = threading.Timer(0.05, lambda peer=peer: [end.close() for end in peer.sockets])
        timer.start()
        with pytest.raises(_native.Failure, match="rank 1 is lost") as caught:
            peer.links.run(steps, SEQUENCE, OPERATION, COUNT, "f32", "sum", DEADLINE_SECONDS)
        assert caught.value.kind == "lost"
        timer.join()


def test_the_deadline_names_who_is_waited_for(peer: Peer) -> None:
    peer.sockets[0].send(chunk(0, 1024))
    start = time.monotonic()
    failure = peer.fail(0.2)
    assert 0.15 < time.monotonic() - start < 5
    assert (failure.kind, failure.peer) == ("timeout", 1)


def test_a_peer_that_sends_trifles_does_not_outlive_the_deadline(peer: Peer) -> None:
    beats = head(type=BEAT, **{"from": 1}) * 64
    over = threading.Event()

    def flood() -> None:
        with contextlib.suppress(OSError):
            while not over.is_set():
                peer.sockets[0].send(beats)

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    assert peer.fail(0.2).kind == "timeout"
    over.set()
    peer.close()
    thread.join(5)


@pytest.mark.parametrize(("kind", "name"), [(0, "lost"), (1, "timeout"), (3, "aborted"), (99, "aborted")])
def test_an_abort_tells_what_has_happened_and_why(peer: Peer, kind: int, name: str) -> None:
    reason = "rank 3 is lost: ▲ no route".encode()
    peer.sockets[0].send(frame(reason, type=ABORT, message=3, operation=kind, **{"from": 1}))
    failure = peer.fail()
    assert (failure.kind, failure.peer, str(failure)) == (name, 3, reason.decode())


@pytest.mark.parametrize("kind", ["sockets", "rings"])
def test_an_abort_from_link_to_link(kind: Kind) -> None:
    world = World(2, kind)
    assert world.links[1].abort(0, -1, "x" * 5000)
    buffer = np.zeros(10, np.float32)
    with pytest.raises(_native.Failure, match="^" + "x" * 4096 + "$") as caught:
        world.links[0].run(located([ScheduleStep(COPY, 1, 0, 1)], buffer, 1), 0, 0, 10, "f32", "sum", 5.0)
    assert (caught.value.kind, caught.value.peer) == ("aborted", -1)
    world.close()


def test_an_abort_is_seen_by_a_rank_that_only_sends(peer: Peer) -> None:
    peer.sockets[0].send(frame(b"no more", type=ABORT, message=1, **{"from": 1}))
    big = np.zeros(1 << 20, np.float32)
    with pytest.raises(_native.Failure, match="no more"):
        peer.links.run(
            located([ScheduleStep(SEND, 1, 0, 1)], big, 1), SEQUENCE, OPERATION, 1 << 20, "f32", "sum", DEADLINE_SECONDS
        )


def test_after_a_failure_buffers_may_go_and_an_abort_still_gets_through() -> None:
    """Rank 0 fails while a large frame is half sent; what follows on that lane is still well formed."""
    peer = Peer()
    big = np.ones(1 << 20, np.float32)
    steps = located([ScheduleStep(SEND, 1, 0, 1)], big, 1)
    with pytest.raises(_native.Failure, match="deadline"):
        peer.links.run(steps, SEQUENCE, OPERATION, 1 << 20, "f32", "sum", 0.1)
    big[:] = 2
    received = bytearray()
    taken = False
    peer.sockets[0].settimeout(0.2)
    for _ in range(1000):
        try:
            received += peer.sockets[0].recv(1 << 20)
        except TimeoutError:
            break
        peer.links.flush(1)
        taken = taken or peer.links.abort(1, 1, "gave up")
    kinds, position = [], 0
    while position < len(received):
        fields = _native.check_frame(bytes(received[position : position + 64]), 0)
        payload = bytes(received[position + 64 : position + 64 + fields["length"]])
        assert _native.crc32c(payload) == fields["payload_crc"]
        kinds.append(fields["type"])
        position += 64 + fields["length"]
    assert taken
    assert payload == b"gave up"
    assert kinds[-2:] == [DATA, ABORT]


BAD_FRAMES: dict[str, tuple[bytes, str, str]] = {
    "garbage": (b"GET / HTTP/1.1\r\n" * 8, "corrupt", "magic"),
    "payload": (chunk(0, 1024, payload_crc=1), "corrupt", "payload_crc does not hold"),
    "too long": (chunk(0, 1024, length=MAX_PAYLOAD + 1), "corrupt", "length is 1048577"),
    "other rank": (chunk(0, 1024, **{"from": 0}), "corrupt", "from is 0"),
    "twice": (chunk(0, 1024) * 2, "corrupt", "message 0 of rank 1 in .* #7 has a chunk that was there already"),
    "second message": (chunk(0, 1024, message=1), "corrupt", "message 1 of rank 1 in .* is one too many"),
    "beyond the end": (chunk(4096, 1024), "corrupt", "other chunks"),
    "far beyond": (chunk((1 << 64) - 1024, 1024), "corrupt", "other chunks"),
    "cut elsewhere": (chunk(512, 1024), "corrupt", "other chunks"),
    "short chunk": (chunk(0, 512), "corrupt", "other chunks"),
    "other count": (
        chunk(0, 1024, count=999),
        "mismatch",
        r"rank 0 calls all_reduce .* of 1000 f32 as operation #7, rank 1 calls .* of 999 f32 as operation #7",
    ),
    "other operation": (chunk(0, 1024, operation=8), "mismatch", r"rank 1 calls barrier as operation #7"),
    "earlier": (chunk(0, 1024, sequence=6), "mismatch", "rank 1 calls .* #6"),
    "later on the only lane": (chunk(0, 1024) + chunk(0, 1024, sequence=8), "mismatch", "rank 1 calls .* #8"),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_bad_frames_are_told_from_each_other(peer: Peer, name: str) -> None:
    data, kind, message = BAD_FRAMES[name]
    peer.sockets[0].send(data)
    with pytest.raises(_native.Failure, match=message) as caught:
        peer.receive()
    assert (caught.value.kind, caught.value.peer) == (kind, 1)


def test_a_later_operation_on_one_lane_of_two_waits_for_the_other() -> None:
    peer = Peer(lanes=2)
    peer.sockets[0].send(chunk(0, 1024, 9, sequence=SEQUENCE + 1))
    threading.Timer(0.1, lambda: peer.sockets[1].send(b"".join(chunk(*where, 1) for where in WHOLE))).start()
    peer.receive()
    assert peer.buffer.tobytes() == b"\1" * 4000


def test_a_later_operation_is_told_when_the_deadline_passes() -> None:
    peer = Peer(lanes=2)
    peer.sockets[0].send(chunk(0, 1024, sequence=SEQUENCE + 1))
    failure = peer.fail(0.2)
    assert (failure.kind, failure.peer) == ("mismatch", 1)
    assert "rank 1 calls all_reduce" in str(failure)
    assert "#8" in str(failure)


@pytest.mark.parametrize("kind", ["sockets", "rings"])
def test_both_sides_learn_of_a_mismatch(kind: Kind) -> None:
    world = World(2, kind)
    programs = ring.all_reduce(Topology.uniform(2)).programs()
    buffers = [np.zeros(100, np.float32), np.zeros(101, np.float32)]

    def call(rank: int) -> Callable[[], None]:
        steps = located(programs[rank], buffers[rank], 2)
        return lambda: world.links[rank].run(steps, 3, 0, len(buffers[rank]), "f32", "sum", DEADLINE_SECONDS)

    errors = in_threads(call(0), call(1))
    calls = [
        f"rank {rank} calls all_reduce (sum) of {count} f32 as operation #3" for rank, count in ((0, 100), (1, 101))
    ]
    assert ", ".join(calls) in str(errors[0])
    assert ", ".join(reversed(calls)) in str(errors[1])
    world.close()


@pytest.mark.parametrize("kind", ["sockets", "rings"])
def test_a_fast_rank_may_run_ahead(kind: Kind) -> None:
    """The root of broadcasts never waits for an answer, so its frames of later operations overtake on other lanes."""
    world = World(2, kind, lanes=3)
    programs = tree.broadcast(Topology.uniform(2)).programs()
    operations, results = 60, np.zeros((60, 3000), np.float32)

    def root() -> None:
        for number in range(operations):
            data = np.full(3000, number + 1, np.float32)
            world.links[0].run(located(programs[0], data, 1), number, 0, 3000, "f32", "sum", DEADLINE_SECONDS, 1000)

    def leaf() -> None:
        time.sleep(0.05)
        for number in range(operations):
            steps = located(programs[1], results[number], 1)
            world.links[1].run(steps, number, 0, 3000, "f32", "sum", DEADLINE_SECONDS, 1000)

    assert in_threads(root, leaf) == [None, None]
    assert (results == np.arange(1, operations + 1, dtype=np.float32)[:, None]).all()
    world.close()


def flipping_proxy(source: socket.socket, target: socket.socket, position: int) -> None:
    """Passes bytes on, and flips one bit of one of them. When one side closes, so does the other."""
    seen = 0
    with contextlib.suppress(OSError):
        while data := bytearray(source.recv(4096)):
            if seen <= position < seen + len(data):
                data[position - seen] ^= 0x10
            seen += len(data)
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("position", [0, 5, 9, 40, 44, 63, 64, 1000, 64 + 2048 + 70])
def test_a_bit_that_flips_on_the_wire_is_noticed(position: int) -> None:
    links = [_native.Links(rank, 2) for rank in range(2)]
    (a, proxy_a), (proxy_b, b) = socket.socketpair(), socket.socketpair()
    links[0].add_tcp(1, [a.detach()])
    links[1].add_tcp(0, [b.detach()])
    for arguments in ((proxy_a, proxy_b, position), (proxy_b, proxy_a, 1 << 40)):
        threading.Thread(target=flipping_proxy, args=arguments, daemon=True).start()
    programs = ring.all_reduce(Topology.uniform(2)).programs()
    buffers = [np.ones(4096, np.float32) for _ in range(2)]

    def call(rank: int) -> Callable[[], None]:
        def run() -> None:
            try:
                steps = located(programs[rank], buffers[rank], 2)
                links[rank].run(steps, 0, 0, 4096, "f32", "sum", DEADLINE_SECONDS, 2048)
            finally:
                links[rank].close()

        return run

    errors = in_threads(call(0), call(1))
    assert isinstance(errors[1], _native.Failure)
    assert (errors[1].kind, errors[1].peer) == ("corrupt", 0)
    assert isinstance(errors[0], _native.Failure)
    assert errors[0].kind == "lost"


def test_a_ring_that_lies_is_refused() -> None:
    world = World(2, "rings")
    memory = np.frombuffer(world.memory[1], np.uint8)  # from rank 1 to rank 0
    buffer = np.zeros(10, np.float32)
    steps = located([ScheduleStep(COPY, 1, 0, 1)], buffer, 1)

    def failure() -> str:
        with pytest.raises(_native.Failure) as caught:
            world.links[0].run(steps, 0, 0, 10, "f32", "sum", 5.0)
        assert caught.value.kind == "corrupt"
        return str(caught.value)

    memory[128:192] = np.frombuffer(head(length=8192, **{"from": 1}), np.uint8)
    memory[0] = 1
    assert "a frame is longer than its slot" in failure()
    memory[140] ^= 1
    assert "head_crc does not hold" in failure()
    memory[0] = 99
    world = World(2, "rings")
    np.frombuffer(world.memory[1], np.uint8)[0] = 99
    assert "more is written than there is room for" in failure()


def test_bad_arguments_are_named() -> None:
    links = _native.Links(0, 2)
    with pytest.raises(ValueError, match="no link to rank 5"):
        links.add_tcp(5, [])
    with pytest.raises(ValueError, match="needs a connection"):
        links.add_tcp(1, [])
    with pytest.raises(ValueError, match="there is no link to rank 1"):
        links.run([(SEND, 1, 0, 0)], 0, 0, 0, "f32", "sum", 1.0)
    with pytest.raises(ValueError, match="multiple of 64"):
        links.add_shm(1, 64, 65, 4, 4096)
    with pytest.raises(ValueError, match="not 4 of 100"):
        links.add_shm(1, 64, 128, 4, 100)
    with pytest.raises(OSError, match="Bad file descriptor"):
        links.add_tcp(1, [987_654])


def test_self_is_no_peer_that_needs_a_link() -> None:
    buffer = np.arange(10, dtype=np.float32)
    steps = located([ScheduleStep(SEND, 0, 0, 1), ScheduleStep(COPY, 0, 1, 1)], buffer, 2)
    _native.Links(0, 1).run(steps, 0, 0, 10, "f32", "sum", 1.0, 8)
    np.testing.assert_array_equal(buffer, [0, 1, 2, 3, 4, 0, 1, 2, 3, 4])


def test_ranks_that_wait_for_a_dead_one_name_it() -> None:
    world = World(3)
    world.links[2].close()
    programs = ring.all_reduce(Topology.uniform(3)).programs()
    buffer = np.ones(100, np.float32)
    with pytest.raises(_native.Failure, match="rank 2 is lost") as caught:
        world.links[0].run(located(programs[0], buffer, 3), 0, 0, 100, "f32", "sum", DEADLINE_SECONDS)
    assert (caught.value.kind, caught.value.peer) == ("lost", 2)
    world.close()
