"""How a worker finds the servers of its job, and proves to each that it belongs to it."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack
from typing import Final

from argosy._native import PsClient
from argosy.comm.sockets import JoinError
from argosy.control.client import Client, DeadlineExceeded
from argosy.control.handshake import ACCEPTED, TABLE, HandshakeError, connect_socket, receive_exactly
from argosy.control.host import HostIdentity
from argosy.control.job import Job
from argosy.control.secret import Secret
from argosy.ps.card import ServerCard, card_key
from argosy.ps.config import PsConfig
from argosy.ps.door import HELLO, PULLS, PUSHES

_ATTEMPT_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.1


def join_servers(job: Job, config: PsConfig, timeout_seconds: float) -> PsClient:
    """Connect to all servers of a job, twice to each: for pulls and for pushes.

    Raises `JoinError`, which names the server, if one does not come or cannot be reached within `timeout_seconds`, has
    another secret, or takes this worker for another's.
    """
    assert job.coordinator is not None
    assert job.secret is not None
    deadline = time.monotonic() + timeout_seconds
    who = f"rank {job.rank}"
    with Client(job.coordinator, job.secret, who=who, timeout_seconds=timeout_seconds) as client:
        cards = [_card(client, number, deadline, timeout_seconds) for number in range(job.servers)]
    here = HostIdentity.here(os.environ.get("ARGOSY_HOST_ID") or None)
    with ExitStack() as unless_joined:
        lanes: dict[int, list[socket.socket]] = {PULLS: [], PUSHES: []}
        for lane, socks in lanes.items():
            for card in cards:
                sock = connect(card, job.secret, job.rank, lane, deadline)
                unless_joined.callback(sock.close)
                socks.append(sock)
        unless_joined.pop_all()
    return PsClient(
        job.rank,
        job.servers,
        [sock.detach() for sock in lanes[PULLS]],
        [sock.detach() for sock in lanes[PUSHES]],
        config.ps_values,
        [here.may_be_near(card.host) for card in cards],
        names=[f"{card.name}, {card.address}:{card.port}" for card in cards],
        timeout_seconds=timeout_seconds,
    )


def connect(card: ServerCard, secret: Secret, client: int, lane: int, deadline: float) -> socket.socket:
    """A proved connection to a server; tried again until `deadline` (of `time.monotonic`)."""
    who = f"rank {client}"
    while True:
        try:
            return _attempt(card, secret, client, lane, min(deadline, time.monotonic() + _ATTEMPT_SECONDS))
        except HandshakeError as error:
            raise JoinError(
                f"{who} and {card} have different secrets ({error}): give all processes of a job the same one "
                f"(--secret-file, ARGOSY_SECRET)"
            ) from None
        except ConnectionRefusedError as error:
            # The port was open when the server told it, so the server has gone since.
            raise JoinError(f"{card} is gone ({error}), before {who} had joined it", echo=True) from error
        except OSError as error:
            if time.monotonic() + _PAUSE_SECONDS >= deadline:
                raise JoinError(
                    f"{who} cannot reach {card} ({error}): see that a firewall lets workers connect to servers",
                    echo=isinstance(error, ConnectionError),
                ) from error
        time.sleep(_PAUSE_SECONDS)


def _attempt(card: ServerCard, secret: Secret, client: int, lane: int, deadline: float) -> socket.socket:
    sock = socket.create_connection((card.address, card.port), timeout=max(deadline - time.monotonic(), 0.001))
    try:
        connect_socket(sock, secret, deadline, TABLE)
        sock.sendall(HELLO.pack(card.number, client, lane))
        if receive_exactly(sock, len(ACCEPTED), deadline) != ACCEPTED:
            raise JoinError(f"{card} does not take rank {client} in: it is of another job, or has fewer workers")
    except BaseException:
        sock.close()
        raise
    return sock


def _card(client: Client, number: int, deadline: float, timeout_seconds: float) -> ServerCard:
    try:
        data = client.get(card_key(number), max(deadline - time.monotonic(), 0.0))
    except DeadlineExceeded:
        raise JoinError(
            f"server {number} has not said within {timeout_seconds:g} s (timeout_seconds) where it listens: see its "
            f"log, server{number}.log in the run's folder",
            echo=True,
        ) from None
    try:
        return ServerCard.parse(number, data)
    except (ValueError, TypeError) as error:
        raise JoinError(f"server {number} has published a card that cannot be read: {error}") from None
