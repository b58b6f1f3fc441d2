"""How an operation of a group can fail. Errors name the operation, its number, the rank and host, and the reason."""

from __future__ import annotations


class CommError(RuntimeError):
    """A collective operation that failed: on which rank and host, which operation, and its number."""

    echo = True  # most often another worker's failure is the reason, and the one to show


class PeerLost(CommError):
    """A peer died, left the group, or cannot be reached: `rank` on `host`, in `operation` number `sequence`."""

    def __init__(self, message: str, rank: int, host: str, operation: str, sequence: int) -> None:
        super().__init__(message)
        self.rank, self.host, self.operation, self.sequence = rank, host, operation, sequence


class DeadlinePassed(PeerLost):
    """A peer did not take part in time: it is stopped, stuck or busy elsewhere."""


class Mismatch(CommError):
    """A peer calls another operation, or one of another size or type."""


class Corrupted(CommError):
    """Bytes arrived from a peer that it did not send."""


class Aborted(CommError):
    """The group was aborted, here or by a peer, or is closed."""
