"""Meetings of those who are there: each worker gives some bytes, and gets what all the others gave.

Where a job goes on without workers that it has lost, so must what the rest do together. A group's collectives cannot:
who is lost is missing from them for ever. Here everybody puts a key at the coordinator for each meeting, and the key of
one who goes before that is put by its last will, as a mark. So a meeting has one key of each, whatever happens, all see
the same keys, and all agree on who was there.
"""

from __future__ import annotations

from typing import Final

from argosy.control import wire
from argosy.control.client import Client

_GONE: Final = b"-"
_HERE: Final = b"+"


class Meetings:
    """The meetings of `world` workers, of whom this one is `rank`. All hold the same ones, in the same order."""

    def __init__(self, client: Client, name: str, rank: int, world: int) -> None:
        self._client, self._name, self._rank = client, name, rank
        self._line = client.line()  # while it is open this worker is there
        self._here = list(range(world))
        self._next = 0
        self._leave_will(0)

    @property
    def here(self) -> tuple[int, ...]:
        """Who was there at the last meeting."""
        return tuple(self._here)

    def meet(self, mine: bytes) -> list[bytes]:
        """What those who are there gave, in the order of their ranks. Waits for all of them."""
        number, self._next = self._next, self._next + 1
        self._leave_will(number + 1)  # before this one is kept: somebody waits for either
        self._client.set(self._key(number, self._rank), _HERE + mine)
        self._line.call({"op": "withdraw", "key": self._key(number, self._rank)})
        told = self._client.multi_get([self._key(number, rank) for rank in self._here])
        self._here = [rank for rank, given in zip(self._here, told, strict=True) if given != _GONE]
        if number:  # whoever came to this meeting has read what was given at the last one
            self._client.delete(self._key(number - 1, self._rank))
        return [given.removeprefix(_HERE) for given in told if given != _GONE]

    def close(self) -> None:
        """Meet no more: the others do not wait for this one."""
        self._line.close()

    def _leave_will(self, number: int) -> None:
        self._line.call({"op": "will", "key": self._key(number, self._rank), "value": wire.pack(_GONE)})

    def _key(self, number: int, rank: int) -> str:
        return f"{self._name}/{number}/{rank}"
