"""A collective operation as plain data: who sends which chunks to whom, in which order.

A `Schedule` is the one description from which a collective is verified (`verify.py`), simulated (`cost.py`), drawn
(`draw.py`) and run. It is a sequence of rounds; a round is a set of transfers between ranks. Rounds put an order on
each rank's own steps and on nothing else: a rank goes on to the next round when its own transfers are done, whatever
the others do. `Schedule.program` gives these steps of one rank.

The buffer of a rank is divided into `slots`, all of (nearly) the same size. A transfer carries `width` slots that begin
at `begin` at its source to those that begin at `into` at its target, where they are reduced into what is there, or
replace it.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]


class Collective(Enum):
    """What a schedule is for."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_TO_ALL = "all_to_all"


class Round(NamedTuple):
    """Transfers of one round: arrays with an entry for each. No rank writes a slot twice, or one that it sends."""

    source: Ints
    target: Ints
    begin: Ints
    into: Ints
    width: Ints
    reduce: Bools

    @property
    def size(self) -> int:
        """How many transfers there are."""
        return len(self.source)


class Step(NamedTuple):
    """One step of one rank: send slots to a peer, or receive them and copy them or reduce them into its own."""

    kind: int
    peer: int
    begin: int
    width: int


SEND, COPY, REDUCE = range(3)
KIND_NAMES = ("send", "receive and copy", "receive and reduce")


@dataclass(frozen=True)
class Schedule:
    """A collective operation of `ranks` ranks. Rounds may be made when they are asked for: large ones are never stored.

    >>> swap = Schedule("swap", Collective.ALL_REDUCE, ranks=2, slots=1, rounds=[transfers([0, 1], [1, 0], [0, 0])])
    >>> swap.programs()[0] == [Step(SEND, peer=1, begin=0, width=1), Step(REDUCE, peer=1, begin=0, width=1)]
    True
    """

    name: str
    collective: Collective
    ranks: int
    slots: int
    rounds: Sequence[Round]
    root: int = 0

    @property
    def data_slots(self) -> int:
        """The slots that hold a rank's data; all-to-all has as many again to receive into."""
        return self.slots // 2 if self.collective is Collective.ALL_TO_ALL else self.slots

    def program(self, rank: int) -> list[Step]:
        """The steps of one rank, in order: in each round it first sends, then receives. This is what it runs."""
        steps: list[Step] = []
        for part in self.rounds:
            sent, received = np.flatnonzero(part.source == rank), np.flatnonzero(part.target == rank)
            kinds = np.where(part.reduce, REDUCE, COPY)
            for kind, peer, begin, at in (
                (np.full(part.size, SEND), part.target, part.begin, sent),
                (kinds, part.source, part.into, received),
            ):
                columns = (column[at].tolist() for column in (kind, peer, begin, part.width))
                steps.extend(map(Step._make, zip(*columns, strict=True)))
        return steps

    def programs(self) -> list[list[Step]]:
        """The steps of all ranks. The same as `program` of each, made at once."""
        programs: list[list[Step]] = [[] for _ in range(self.ranks)]
        for part in self.rounds:
            rows = list(zip(*(column.tolist() for column in part), strict=True))
            for source, target, begin, _, width, _ in rows:
                programs[source].append(Step(SEND, target, begin, width))
            for source, target, _, into, width, reduce in rows:
                programs[target].append(Step(REDUCE if reduce else COPY, source, into, width))
        return programs


class Made(Sequence[Round]):
    """Rounds that a function makes by their number."""

    def __init__(self, length: int, make: Callable[[int], Round]) -> None:
        self._length, self._make = length, make

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: Any) -> Any:
        return self._make(range(self._length)[number])

    def __iter__(self) -> Iterator[Round]:
        return map(self._make, range(self._length))


def in_turn(*parts: Sequence[Round]) -> Made:
    """The rounds of several schedules, one behind the other, made when they are asked for."""
    ends = list(itertools.accumulate(len(part) for part in parts))

    def make(number: int) -> Round:
        which = bisect.bisect_right(ends, number)
        return parts[which][number - ends[which]]

    return Made(ends[-1], make)


def transfers(
    source: npt.ArrayLike,
    target: npt.ArrayLike,
    begin: npt.ArrayLike,
    into: npt.ArrayLike | None = None,
    width: npt.ArrayLike = 1,
    reduce: npt.ArrayLike = True,
) -> Round:
    """A round from its columns; a single number stands for a column of it."""
    columns = np.broadcast_arrays(source, target, begin, begin if into is None else into, width)
    ints = [np.ascontiguousarray(column, dtype=np.int32) for column in columns]
    flags = np.broadcast_to(np.asarray(reduce, dtype=np.bool_), ints[0].shape)
    return Round._make([*ints, np.ascontiguousarray(flags)])


def together(parts: Sequence[Sequence[Round]]) -> list[Round]:
    """Schedules of disjoint ranks run side by side: their first rounds are one round, and so on."""
    longest = max((len(part) for part in parts), default=0)
    return [
        Round(
            *(np.concatenate(columns) for columns in zip(*[p[number] for p in parts if number < len(p)], strict=True))
        )
        for number in range(longest)
    ]
