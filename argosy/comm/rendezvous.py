"""How the ranks of a group find each other: who shares a host, and sockets to everybody else.

Ranks meet at a store, any of torch.distributed's (Argosy's own is `CoordinatorStore`). Each publishes a card that says
who it is and where its memory is. Which ranks share a host is found by trying: each maps the memory of those that may
be near, and only where every pair succeeded, both ways, do ranks count as one host. Ranks of different hosts connect to
each other (`sockets.py`). In short, with a key for each rank in every phase:

    card      all                         name, host, memory, own address towards the store
    reached   those with somebody near    whose memory could be mapped
    listen    those with a higher rank    where they listen; only if there is more than one host
              on another host
    done      all                         nothing is read any more; rank 0 removes the keys when it has seen them all

What is read from the store is length-capped JSON (`board.py`) whose every field is checked.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import secrets
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Protocol

from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from argosy.comm.board import Board
from argosy.comm.sockets import NONCE_BYTES, Address, Introductions, JoinError, listen_at, open_secret
from argosy.control.client import parse_address
from argosy.control.host import MAX_TEXT, HostIdentity
from argosy.control.network import LOOPBACK, address_towards, is_loopback
from argosy.control.secret import Secret
from argosy.control.store import CoordinatorStore

_EXTRA_SOCKETS: Final = 2  # to each peer beside those for collectives: control, and messages


class Memory(Protocol):
    """What the rendezvous needs of an engine: its heap to show around, and somebody to hand peers to."""

    def card(self) -> tuple[int, int, int, bytes]:
        """Where peers find the heap: process, descriptor, bytes, and a nonce that is also in the heap."""

    def map_peer(self, rank: int, pid: int, fd: int, bytes: int, nonce: bytes) -> bool:
        """Map the heap of a peer; False if it cannot be reached, or is not the one with this nonce."""

    def add_sockets(self, rank: int, fds: list[int]) -> None:
        """Take over the connected sockets to a peer: control, collectives, messages."""

    def set_hosts(self, host_numbers: list[int], host_names: list[str]) -> None:
        """Learn the host of each rank, as a number and as a name."""


@dataclass(frozen=True)
class Meeting:
    """The ranks as they have found each other: the number and the name of each one's host."""

    hosts: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Card:
    """What a rank tells the others about itself."""

    name: str
    host_id: str | None
    boot: str | None
    pid_namespace: int | None
    pid: int
    fd: int
    heap_bytes: int
    nonce: str
    address: str
    size: int
    sockets: int
    group: str | None
    """A nonce for the whole group; that of rank 0 counts."""

    @classmethod
    def parse(cls, given: dict[str, Any]) -> Card:
        """A card from its fields; raises `ValueError` unless every one is what it should be."""
        names = {field.name for field in fields(cls)}
        if set(given) != names:
            raise ValueError(f"it has the fields {sorted(given)} instead of {sorted(names)}")
        card = cls(**given)
        for name in ("pid", "fd", "heap_bytes", "size", "sockets"):
            _require(isinstance(number := given[name], int) and 0 <= number < 1 << 62, name, given[name])
        _require(card.pid_namespace is None or isinstance(card.pid_namespace, int), "pid_namespace", card.pid_namespace)
        for name in ("name", "address"):
            _require(isinstance(given[name], str) and len(given[name]) <= MAX_TEXT, name, given[name])
        for name in ("host_id", "boot"):
            text = given[name]
            _require(text is None or (isinstance(text, str) and len(text) <= MAX_TEXT), name, text)
        for name in ("nonce", "group"):
            text = given[name]
            hexadecimal = isinstance(text, str) and re.fullmatch(f"[0-9a-f]{{{2 * NONCE_BYTES}}}", text) is not None
            _require(hexadecimal or (name == "group" and text is None), name, text)
        is_loopback(card.address)  # raises ValueError if it is no address
        return card

    def may_be_near(self, other: Card) -> bool:
        """Whether it is worth trying to map the other's memory."""
        mine, theirs = (HostIdentity(card.host_id, card.boot, card.pid_namespace) for card in (self, other))
        return mine.may_be_near(theirs)


def meet(
    engine: Memory,
    store: Store,
    rank: int,
    size: int,
    *,
    secret: Secret | None,
    host_id: str | None,
    sockets: int,
    deadline_seconds: float,
) -> Meeting:
    """Bring `size` ranks together; every one calls this with the same store, under a prefix of the group's own.

    Afterwards the engine has mapped the memory of the ranks on its host and has `sockets` + 2 sockets to each other
    rank, not blocking and without delay. `host_id` overrides what is found out about hosts: ranks with different ids
    (or one without) are on different hosts. Raises `JoinError` when a rank does not come within `deadline_seconds`.
    """
    if host_id is not None and not 0 < len(host_id) <= MAX_TEXT:
        raise JoinError(f"ARGOSY_HOST_ID has {len(host_id)} characters: give it 1 to {MAX_TEXT}, or leave it out")
    if size == 1:
        meeting = Meeting((0,), (host_id or socket.gethostname(),))
        engine.set_hosts(list(meeting.hosts), list(meeting.names))
        return meeting
    board = Board(store, rank, size, deadline_seconds)
    with board.failures_told():
        board.publish("card", asdict(_own_card(engine, store, rank, size, host_id, sockets)))
        cards = _cards(board)
        hosts = _find_hosts(engine, board, cards)
        meeting = Meeting(hosts, tuple(card.host_id or card.name for card in cards))
        engine.set_hosts(list(hosts), list(meeting.names))
        if len(set(hosts)) > 1:
            made = _connect(board, cards, hosts, secret, sockets + _EXTRA_SOCKETS)
            for peer, pair in made.items():
                engine.add_sockets(peer, [sock.detach() for sock in pair])
        board.publish("done", {})
        if rank == 0:
            board.read("done", range(size))
    if rank == 0:
        board.clear()
    return meeting


def _own_card(engine: Memory, store: Store, rank: int, size: int, host_id: str | None, sockets: int) -> Card:
    pid, fd, heap_bytes, nonce = engine.card()
    towards = _store_address(store)
    address = address_towards(*towards) if towards is not None else None
    return Card(
        name=socket.gethostname()[:MAX_TEXT],
        **asdict(HostIdentity.here(host_id)),
        pid=pid,
        fd=fd,
        heap_bytes=heap_bytes,
        nonce=nonce.hex(),
        address=address or LOOPBACK,
        size=size,
        sockets=sockets,
        group=secrets.token_hex(NONCE_BYTES) if rank == 0 else None,
    )


def _cards(board: Board) -> list[Card]:
    """Everybody's card, seen to be of the same group."""
    cards = []
    for rank, value in enumerate(board.read("card", range(board.size))):
        try:
            cards.append(Card.parse(value))
        except (ValueError, TypeError) as error:
            raise JoinError(f"rank {rank} has published a card that cannot be read: {error}") from None
    for rank, card in enumerate(cards):
        for name in ("size", "sockets"):
            first, other = getattr(cards[0], name), getattr(card, name)
            if first != other:
                what = {"size": "the number of workers", "sockets": "sockets (in the strategy)"}[name]
                raise JoinError(f"{what} must be the same on all workers: rank 0 has {first}, rank {rank} has {other}")
    if cards[0].group is None:
        raise JoinError("rank 0 has published a card without a nonce for the group: is there a second rank 0?")
    return cards


def _find_hosts(engine: Memory, board: Board, cards: list[Card]) -> tuple[int, ...]:
    """Map whoever is near, hear how the others fared, and number the hosts."""
    near = [
        [o for o in range(board.size) if o != rank and cards[rank].may_be_near(cards[o])] for rank in range(board.size)
    ]
    if near[board.rank]:
        mapped = []
        for peer in near[board.rank]:
            card = cards[peer]
            if engine.map_peer(peer, card.pid, card.fd, card.heap_bytes, bytes.fromhex(card.nonce)):
                mapped.append(peer)
        # As a number with a bit for each rank: short however many there are.
        board.publish("reached", {"ranks": f"{sum(1 << peer for peer in mapped):x}"})
    telling = [rank for rank in range(board.size) if near[rank]]
    reached = [0] * board.size
    for rank, value in zip(telling, board.read("reached", telling), strict=True):
        ranks = value.get("ranks")
        if not isinstance(ranks, str) or not re.fullmatch("[0-9a-f]+", ranks):
            raise JoinError(f"rank {rank} has published a list of ranks that cannot be read")
        reached[rank] = int(ranks, 16) & sum(1 << peer for peer in near[rank])
    return number_hosts(reached)


def number_hosts(reached: Sequence[int]) -> tuple[int, ...]:
    """The host of each rank, numbered in order of their first ranks, from the ranks that each reached, as bits.

    A rank belongs to the first host whose ranks it all reaches and is reached by; if there is none, it is one itself.

    >>> number_hosts([0b110, 0b101, 0b011])
    (0, 0, 0)
    >>> number_hosts([0b110, 0b001, 0b001])  # 1 and 2 do not reach each other
    (0, 0, 1)
    """
    hosts: list[list[int]] = []
    for rank, mine in enumerate(reached):
        for members in hosts:
            if all(mine >> other & 1 and reached[other] >> rank & 1 for other in members):
                members.append(rank)
                break
        else:
            hosts.append([rank])
    numbers = {rank: number for number, members in enumerate(hosts) for rank in members}
    return tuple(numbers[rank] for rank in range(len(reached)))


def _connect(
    board: Board, cards: list[Card], hosts: tuple[int, ...], secret: Secret | None, per_pair: int
) -> dict[int, list[socket.socket]]:
    """Sockets to the ranks on other hosts."""
    rank = board.rank
    away = [other for other in range(board.size) if hosts[other] != hosts[rank]]
    lower, higher = [other for other in away if other < rank], [other for other in away if other > rank]
    beyond = next((card.address for card in cards if not is_loopback(card.address)), None)
    if secret is None and beyond is not None:
        raise JoinError(
            "the workers are on several hosts and have no secret to know each other by: make one with `argosy secret` "
            "and give it to all of them as ARGOSY_SECRET (workers on one host need none)"
        )
    _check_descriptors(len(away) * per_pair)
    assert cards[0].group is not None
    nonce = bytes.fromhex(cards[0].group)
    with contextlib.ExitStack() as closing:
        listener = None
        if higher:
            address = cards[rank].address
            if is_loopback(address) and beyond is not None:
                # The store is on this very machine and known by its loopback address here; others come from elsewhere.
                address = address_towards(beyond, 1) or address
            listener = closing.enter_context(listen_at(address))
            board.publish("listen", {"address": address, "port": listener.getsockname()[1]})
        call = {peer: _address(peer, value) for peer, value in zip(lower, board.read("listen", lower), strict=True)}
        introductions = Introductions(
            rank,
            nonce,
            secret or open_secret(nonce),
            per_pair,
            call=call,
            expect=set(higher),
            listener=listener,
        )
        return introductions.make(board.deadline, board.watch)


def _address(rank: int, value: dict[str, Any]) -> Address:
    address, port = value.get("address"), value.get("port")
    try:
        if not isinstance(address, str) or not isinstance(port, int) or not 0 < port < 1 << 16:
            raise ValueError(f"{address!r}, {port!r}")
        is_loopback(address)
    except ValueError as error:
        raise JoinError(f"rank {rank} has published no address to connect to: {error}") from None
    return address, port


def _check_descriptors(needed: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_now = len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and open_now + needed > limit:
        raise JoinError(
            f"the sockets to the other hosts' workers are {needed}, and this process may open {limit} files, of which "
            f"{open_now} are open: raise the limit (`ulimit -n {open_now + needed + 256}`) or use fewer "
            f"(sockets= in the strategy)"
        )


def _store_address(store: Store) -> Address | None:
    """Where the store's server is; None for one that has none, which is on this machine."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, CoordinatorStore):
        return parse_address(store.address)
    if isinstance(store, TCPStore):
        return store.host, store.port
    return None


def _require(holds: bool, name: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}"[:MAX_TEXT])
