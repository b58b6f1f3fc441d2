"""A server's process: it holds tables, lets workers in, and runs none of the user's code.

Started by the launcher as `python -m argosy.ps.serve --number 0 --workers 4 ...`, with the coordinator's address and
the job's secret in its environment. It ends when the launcher says so (SIGTERM), or with the launcher. All requests are
served by native threads; Python is at the door only (`door.py`). torch is not imported.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any, Protocol

from argosy._native import PsServer, guard
from argosy.comm.sockets import listen_at
from argosy.control.client import Client, parse_address
from argosy.control.host import HostIdentity
from argosy.control.job import Job
from argosy.control.network import LOOPBACK, address_towards
from argosy.observe.channel import Channel
from argosy.observe.events import EventLog
from argosy.observe.folder import events_file
from argosy.ps.card import ServerCard, card_key
from argosy.ps.door import Door, Tables
from argosy.ps.staleness import FIELDS

_CONNECT_SECONDS = 30.0
_TELL_SECONDS = 30.0  # between two events that tell what was counted so far


class Server(Tables, Protocol):
    """The native server: `argosy._native.PsServer`."""

    def stop(self) -> None:
        """End all connections and threads."""

    def stats(self) -> dict[str, Any]:
        """What it has done so far."""


def main() -> None:
    """Serve until the launcher says that it is over."""
    channel = socket.socket(fileno=int(os.environ["ARGOSY_CHANNEL"]))
    channel.set_inheritable(False)
    guard(channel.fileno())
    try:
        options = _options(sys.argv[1:])
        tables = PsServer(options.workers, options.aggregate, options.not_finite == "reject")
        asyncio.run(serve(Job.from_environment(os.environ), options.number, options.workers, tables))
        counted = tables.stats()
        Channel(channel, time.monotonic).event({"event": "counted", **{name: counted[name] for name in FIELDS}})
    except Exception as error:
        report = traceback.format_exc()
        message = traceback.format_exception_only(error)[-1].strip()
        if not Channel(channel, time.monotonic).failure(message, report, status=1):
            print(report, file=sys.stderr)
        sys.exit(1)
    finally:
        channel.detach()  # the descriptor lives as long as the process: the guard watches it


async def serve(job: Job, number: int, workers: int, tables: Server) -> None:
    """Publish where server `number` listens, and let clients in until SIGTERM; then stop."""
    assert job.coordinator is not None
    assert job.secret is not None
    over = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(name, over.set)
    address = address_towards(*parse_address(job.coordinator)) or LOOPBACK
    log = EventLog(events_file(job.run_folder, number, "server"), number) if job.run_folder is not None else None
    with listen_at(address) as listener:
        port = listener.getsockname()[1]
        door = Door(listener, job.secret, number, workers, tables)
        opened = asyncio.create_task(door.open())
        host = HostIdentity.here(os.environ.get("ARGOSY_HOST_ID") or None)
        card = ServerCard(number, address, port, os.getpid(), socket.gethostname()[:255], host)
        await asyncio.to_thread(_publish, job, card)
        if log is not None:
            log.emit("start", role="server", host=card.name, pid=card.pid, address=address, port=port, workers=workers)
        waiting = asyncio.create_task(over.wait())
        ends = {waiting, opened}
        while not (await asyncio.wait(ends, timeout=_TELL_SECONDS, return_when=asyncio.FIRST_COMPLETED))[0]:
            if log is not None:
                log.emit("stats", stats=tables.stats())
        if opened.done():
            opened.result()  # a door that does not open again is an error of ours
        opened.cancel()
    if log is not None:
        log.emit("end", status="done", strangers=door.refused, stats=tables.stats())
        log.close()
    tables.stop()


def _publish(job: Job, card: ServerCard) -> None:
    assert job.coordinator is not None
    assert job.secret is not None
    with Client(job.coordinator, job.secret, who=f"server {card.number}", connect_seconds=_CONNECT_SECONDS) as client:
        client.set(card_key(card.number), card.to_json())


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m argosy.ps.serve", description=__doc__)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--aggregate", type=int, required=True)
    parser.add_argument("--not-finite", choices=["reject", "count"], required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
