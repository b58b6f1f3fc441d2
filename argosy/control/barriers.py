"""Named barriers of the coordinator: all of `size` participants arrive, then all go on.

A name may be used again and again. Each use is a generation, an object of its own: once complete it is taken out of
the dictionary before anybody is released, so that a participant that is quick to come back starts the next generation
and cannot slip into the one just left. A name that nobody waits at costs nothing.
"""

from __future__ import annotations

import asyncio
from typing import Final

_NAMES_SHOWN: Final = 16


class BarrierMismatchError(Exception):
    """Participants of one barrier disagree on how many they are."""


class _Generation:
    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.arrivals: list[Arrival] = []


class Arrival:
    """One participant waiting; `released` is settled when the last one came."""

    def __init__(self, generation: _Generation, who: str) -> None:
        self.who = who or "somebody"
        self.released: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._generation = generation

    def describe(self) -> str:
        """Say how many arrived and who, for the error of one that waited in vain."""
        arrivals = self._generation.arrivals
        names = ", ".join(arrival.who for arrival in arrivals[:_NAMES_SHOWN])
        if len(arrivals) > _NAMES_SHOWN:
            names += f" and {len(arrivals) - _NAMES_SHOWN} more"
        return f"{len(arrivals)} of {self._generation.size} arrived ({names})"


class Barriers:
    """All barriers at which somebody waits."""

    def __init__(self) -> None:
        self._open: dict[str, _Generation] = {}

    def __len__(self) -> int:
        return len(self._open)

    def arrive(self, name: str, size: int, who: str) -> Arrival:
        """Join the open generation of a barrier; the last one to arrive releases all."""
        generation = self._open.get(name)
        if generation is None:
            generation = self._open[name] = _Generation(name, size)
        arrival = Arrival(generation, who)
        if size != generation.size:
            first = generation.arrivals[0].who
            raise BarrierMismatchError(
                f"barrier {name!r}: {arrival.who} came for {size} participants, {first} for {generation.size}"
            )
        generation.arrivals.append(arrival)
        if len(generation.arrivals) == size:
            del self._open[name]
            for each in generation.arrivals:
                each.released.set_result(None)
        return arrival

    def withdraw(self, arrival: Arrival) -> None:
        """Take back an arrival that was not released: it waited in vain, or its connection is gone."""
        if arrival.released.done():
            return
        generation = arrival._generation
        generation.arrivals.remove(arrival)
        if not generation.arrivals:
            del self._open[generation.name]
