"""An operation that was started and may still run."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Pending(ABC):
    """What an operation returns. After `wait=True`, the default, it is done already."""

    source: int | None = None
    """Who sent the message, once a receive from any rank is done."""

    @abstractmethod
    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when the operation is done; raise the `CommError` it failed with.

        The operation has the group's deadline. A shorter time given here ends the wait for a collective, which goes
        on; a message that does not come in it breaks the group.
        """

    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""


class Done(Pending):
    """An operation that is over."""

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return at once."""

    def done(self) -> bool:
        """It is."""
        return True


DONE = Done()
