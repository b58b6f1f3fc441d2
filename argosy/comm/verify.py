"""The verifier: runs a schedule on symbols instead of numbers, and proves what it computes.

A slot holds a symbol: which slot of the input it is made of, and the set of ranks whose contributions it contains. To
reduce is to unite two disjoint sets for the same input slot; anything else is an error, so a contribution that is
counted twice, or lands in the wrong place, is found where it happens. Ranks run their programs as far as they can:
sending never waits, receiving waits for the message. If nobody can go on and somebody is not done, there is a wait
cycle, or a message that is never sent. At the end every slot that the collective promises must hold what it promises.

`check_rounds` adds what running in place needs: within a round no rank writes a slot that it also sends.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from argosy.comm.schedule import KIND_NAMES, REDUCE, SEND, Collective, Ints, Round, Schedule, Step


class ScheduleError(ValueError):
    """A schedule that does not compute what it should: at which rank and step, and why."""


class Symbol(NamedTuple):
    """A slot's content: the input slot it is made of, and the ranks that contributed, as a set of bits."""

    slot: int
    ranks: int


State = list[list[Symbol | None]]


def verify(schedule: Schedule) -> None:
    """Prove that a schedule does what its collective promises; raise `ScheduleError` if it does not."""
    one_each = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.ALL_TO_ALL)
    if schedule.collective in one_each and schedule.data_slots != schedule.ranks:
        raise ScheduleError(f"{schedule.collective.value} has a slot of data for each rank, not {schedule.data_slots}")
    for number, part in enumerate(schedule.rounds):
        check_rounds(part, schedule, number)
    final = execute(schedule.programs(), initial(schedule))
    check_result(final, schedule)


def initial(schedule: Schedule) -> State:
    """What each rank holds before the operation."""
    kind, ranks, slots = schedule.collective, schedule.ranks, schedule.slots
    state: State = [[None] * slots for _ in range(ranks)]
    for rank in range(ranks):
        own: Sequence[int] = range(slots)
        if kind is Collective.BROADCAST and rank != schedule.root:
            own = ()
        elif kind is Collective.ALL_GATHER:
            own = (rank,)
        elif kind is Collective.ALL_TO_ALL:
            own = range(ranks)
        for slot in own:
            state[rank][slot] = Symbol(slot, 1 << rank)
    return state


def execute(programs: list[list[Step]], state: State) -> State:
    """Run all programs as far as they go; every one must reach its end, and every message its reader."""
    position = [0] * len(programs)
    messages: defaultdict[tuple[int, int], deque[list[Symbol]]] = defaultdict(deque)
    ready = deque(range(len(programs)))
    waiting: set[int] = set()
    while ready:
        rank = ready.popleft()
        program = programs[rank]
        while position[rank] < len(program):
            step = program[position[rank]]
            if step.kind == SEND:
                messages[rank, step.peer].append(_taken(state, rank, step))
                if step.peer in waiting:
                    waiting.discard(step.peer)
                    ready.append(step.peer)
            elif messages[step.peer, rank]:
                _put(state, rank, step, messages[step.peer, rank].popleft())
            else:
                waiting.add(rank)
                break
            position[rank] += 1
    if waiting:
        raise ScheduleError(_describe_waits(programs, position, waiting))
    for (source, target), unread in messages.items():
        if unread:
            raise ScheduleError(f"rank {target} never reads {len(unread)} messages of rank {source}")
    return state


def _taken(state: State, rank: int, step: Step) -> list[Symbol]:
    symbols = []
    for slot in range(step.begin, step.begin + step.width):
        symbol = state[rank][slot]
        if symbol is None:
            raise ScheduleError(f"rank {rank} sends slot {slot} to rank {step.peer} before anything is in it")
        symbols.append(symbol)
    return symbols


def _put(state: State, rank: int, step: Step, symbols: list[Symbol]) -> None:
    if len(symbols) != step.width:
        raise ScheduleError(f"rank {rank} expects {step.width} slots from rank {step.peer} and gets {len(symbols)}")
    for slot, new in enumerate(symbols, step.begin):
        if step.kind == REDUCE:
            old = state[rank][slot]
            if old is None or old.slot != new.slot:
                raise ScheduleError(
                    f"rank {rank} reduces {new} of rank {step.peer} into slot {slot}, which holds {old}"
                )
            if old.ranks & new.ranks:
                twice = (old.ranks & new.ranks).bit_length() - 1
                raise ScheduleError(
                    f"rank {rank} counts rank {twice} twice in slot {slot}, by a message of {step.peer}"
                )
            new = Symbol(new.slot, old.ranks | new.ranks)
        state[rank][slot] = new


def _describe_waits(programs: list[list[Step]], position: list[int], waiting: set[int]) -> str:
    rank = min(waiting)
    path: list[int] = []
    while rank in waiting and rank not in path:
        path.append(rank)
        rank = programs[rank][position[rank]].peer
    links = [f"rank {r} in step {position[r]} ({KIND_NAMES[programs[r][position[r]].kind]})" for r in path]
    end = "in a circle" if rank in path else f"for rank {rank}, which is done"
    return f"{len(waiting)} ranks wait for ever: {', '.join(links[:8])} wait {end}"


def check_rounds(part: Round, schedule: Schedule, number: int) -> None:
    """Refuse a round that cannot run in place: a slot out of range, written twice, or sent and written."""
    ranks = np.concatenate([part.source, part.target])
    if part.size and not 0 <= ranks.min() <= ranks.max() < schedule.ranks:
        raise ScheduleError(f"round {number} names ranks that do not exist")
    ends = np.maximum(part.begin, part.into) + part.width
    if part.size and (
        ends.max() > schedule.slots or min(part.begin.min(), part.into.min()) < 0 or part.width.min() < 1
    ):
        raise ScheduleError(f"round {number} moves slots that do not exist")
    written = _slots(part.target, part.into, part.width, schedule.slots)
    sent = _slots(part.source, part.begin, part.width, schedule.slots)
    if len(np.unique(written)) < len(written):
        raise ScheduleError(f"round {number} writes a slot twice")
    if len(np.intersect1d(written, sent)):
        raise ScheduleError(f"round {number} writes a slot that the same rank sends")


def _slots(rank: Ints, begin: Ints, width: Ints, slots: int) -> npt.NDArray[np.int64]:
    """Every (rank, slot) of some transfers, as one number each."""
    first = rank.astype(np.int64) * slots + begin
    within = np.arange(width.sum()) - np.repeat(np.cumsum(width) - width, width)
    return np.asarray(np.repeat(first, width) + within, dtype=np.int64)


def check_result(state: State, schedule: Schedule) -> None:
    """Compare what the ranks hold in the end with what the collective promises."""
    kind, ranks = schedule.collective, schedule.ranks
    everybody = (1 << ranks) - 1
    for rank in range(ranks):
        promised: dict[int, Symbol] = {}
        if kind is Collective.ALL_REDUCE or (kind is Collective.REDUCE and rank == schedule.root):
            promised = {slot: Symbol(slot, everybody) for slot in range(schedule.slots)}
        elif kind is Collective.REDUCE_SCATTER:
            promised = {rank: Symbol(rank, everybody)}
        elif kind is Collective.BROADCAST:
            promised = {slot: Symbol(slot, 1 << schedule.root) for slot in range(schedule.slots)}
        elif kind is Collective.ALL_GATHER:
            promised = {slot: Symbol(slot, 1 << slot) for slot in range(ranks)}
        elif kind is Collective.ALL_TO_ALL:
            promised = {ranks + source: Symbol(rank, 1 << source) for source in range(ranks)}
        for slot, symbol in promised.items():
            if state[rank][slot] != symbol:
                raise ScheduleError(f"rank {rank} ends with {state[rank][slot]} in slot {slot}, not with {symbol}")
