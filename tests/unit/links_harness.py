"""A world of ranks as threads of one process: links over socketpairs or rings, and whole schedules run on them."""

from __future__ import annotations

import itertools
import mmap
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from argosy import _native
from argosy.comm.schedule import Collective, Schedule
from argosy.comm.schedule import Step as ScheduleStep

Array = npt.NDArray[Any]
Kind = Literal["sockets", "rings"]
DEADLINE_SECONDS = 20.0
SLOTS, SLOT_BYTES = 4, 4096
SEQUENCE, OPERATION = 7, 0x030000  # all_reduce (max), for what a message says


def ring_memory() -> mmap.mmap:
    return mmap.mmap(-1, _native.ring_bytes(SLOTS, SLOT_BYTES))


def address(buffer: Any) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0])


class World:
    """Ranks that are linked pairwise. `close` ends the links; memory that rings lie in lives as long as the world."""

    def __init__(self, size: int, kind: Kind = "sockets", lanes: int = 1) -> None:
        self.size = size
        self.links = [_native.Links(rank, size) for rank in range(size)]
        self.memory: list[mmap.mmap] = []
        for a, b in itertools.combinations(range(size), 2):
            if kind == "sockets":
                pairs = [socket.socketpair() for _ in range(lanes)]
                self.links[a].add_tcp(b, [one.detach() for one, _ in pairs])
                self.links[b].add_tcp(a, [other.detach() for _, other in pairs])
            else:
                there, back = ring_memory(), ring_memory()
                self.memory += [there, back]
                self.links[a].add_shm(b, address(there), address(back), SLOTS, SLOT_BYTES)
                self.links[b].add_shm(a, address(back), address(there), SLOTS, SLOT_BYTES)

    def close(self) -> None:
        for links in self.links:
            links.close()


def in_threads(*calls: Callable[[], None]) -> list[BaseException | None]:
    """Run all at once, and tell what each raised."""
    results: list[BaseException | None] = [None] * len(calls)

    def work(number: int) -> None:
        try:
            calls[number]()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_SECONDS)
        assert not thread.is_alive(), "a rank hangs"
    return results


def slot_bounds(slots: int, count: int) -> list[int]:
    """Where each slot begins, in elements, and where the last one ends."""
    return [slot * count // slots for slot in range(slots + 1)]


def located(program: Sequence[ScheduleStep], buffer: Array, slots: int) -> list[tuple[int, int, int, int]]:
    """A rank's program on its buffer: the steps that the native core takes."""
    base, width = buffer.__array_interface__["data"][0], buffer.itemsize
    bounds = slot_bounds(slots, len(buffer))
    return [
        (
            step.kind,
            step.peer,
            base + bounds[step.begin] * width,
            (bounds[step.begin + step.width] - bounds[step.begin]) * width,
        )
        for step in program
    ]


def run_schedule(
    world: World,
    schedule: Schedule,
    buffers: Sequence[Array],
    dtype: str,
    op: str = "sum",
    sequence: int = SEQUENCE,
    chunk_bytes: int = 0,
) -> None:
    """Run a schedule in place on the ranks' buffers; raise what the first rank raised that did."""
    steps = [
        located(program, buffer, schedule.slots) for program, buffer in zip(schedule.programs(), buffers, strict=True)
    ]

    def call(rank: int) -> Callable[[], None]:
        count = len(buffers[rank])
        return lambda: world.links[rank].run(
            steps[rank], sequence, OPERATION, count, dtype, op, DEADLINE_SECONDS, chunk_bytes
        )

    for error in in_threads(*(call(rank) for rank in range(world.size))):
        if error is not None:
            raise error


def check_schedule_result(schedule: Schedule, before: Sequence[Array], after: Sequence[Array]) -> None:
    """Compare with numpy what each rank's buffer holds; inputs must be such that sums are exact."""
    total = np.sum(np.stack(before).astype(np.float64), axis=0).astype(before[0].dtype)
    kind, bounds = schedule.collective, slot_bounds(schedule.slots, len(before[0]))
    for rank, result in enumerate(after):
        if kind is Collective.ALL_REDUCE or (kind is Collective.REDUCE and rank == schedule.root):
            np.testing.assert_array_equal(result, total)
        elif kind is Collective.REDUCE_SCATTER:
            own = slice(bounds[rank], bounds[rank + 1])
            np.testing.assert_array_equal(result[own], total[own])
        elif kind is Collective.BROADCAST:
            np.testing.assert_array_equal(result, before[schedule.root])
        elif kind is Collective.ALL_GATHER:
            parts = [before[r][bounds[r] : bounds[r + 1]] for r in range(schedule.ranks)]
            np.testing.assert_array_equal(result, np.concatenate(parts))
        elif kind is Collective.ALL_TO_ALL:
            ranks = schedule.ranks
            for source in range(ranks):
                got = result[bounds[ranks + source] : bounds[ranks + source + 1]]
                np.testing.assert_array_equal(got, before[source][bounds[rank] : bounds[rank + 1]])
