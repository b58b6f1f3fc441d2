"""Operations of the engine that are under way. The engine keeps their tensors until they are done."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NoReturn

from argosy._native import Delivery, Engine, EngineError, Ticket
from argosy.comm.pending import Pending

Raise = Callable[[Exception], NoReturn]
"""Raises what the engine told as one of the group's errors."""


class UnderWay(Pending):
    """What collectives and messages have in common: how a failure is told."""

    def __init__(self, engine: Engine, raise_from: Raise) -> None:
        self._engine, self._raise_from = engine, raise_from

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when it is over; raise what it failed with."""
        try:
            self._wait(timeout_seconds)
        except EngineError as error:
            self._raise_from(error)

    @abstractmethod
    def _wait(self, timeout_seconds: float | None) -> None: ...


class Started(UnderWay):
    """A collective in the engine's queue. A caller that waits before it has begun does the work itself."""

    def __init__(self, engine: Engine, ticket: Ticket, raise_from: Raise) -> None:
        super().__init__(engine, raise_from)
        self._ticket = ticket

    def _wait(self, timeout_seconds: float | None) -> None:
        self._engine.wait(self._ticket, timeout_seconds)

    def done(self) -> bool:
        """Whether it is over."""
        return self._ticket.done


class Posted(UnderWay):
    """A message on its way: handed over, or come, when it is done."""

    def __init__(self, engine: Engine, delivery: Delivery, raise_from: Raise) -> None:
        super().__init__(engine, raise_from)
        self._delivery = delivery

    def _wait(self, timeout_seconds: float | None) -> None:
        self._engine.wait_message(self._delivery, timeout_seconds)
        self.source = self._delivery.source

    def done(self) -> bool:
        """Whether it is over."""
        return self._engine.message_done(self._delivery)
