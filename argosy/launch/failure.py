"""Why a run ended early: told to the user, and passed between the launchers of a job as JSON."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Failure:
    """What happened first (`rank 2 failed`), in what way, the run's exit status, and a traceback if there is one."""

    what: str
    detail: str
    status: int
    traceback: str = ""

    def to_json(self) -> bytes:
        """The form in which launchers tell each other."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Failure:
        """What another launcher told."""
        return cls(**json.loads(data))


def ended(status: int) -> str:
    """An exit status in words.

    >>> ended(3), ended(-11)
    ('exited with status 3', 'was killed by SIGSEGV')
    """
    if status >= 0:
        return f"exited with status {status}"
    hint = " (was the machine out of memory? see dmesg)" if status == -signal.SIGKILL else ""
    return f"was killed by {signal_name(status)}{hint}"


def signal_name(status: int) -> str:
    """The name of the signal that ended a process, from its negative status.

    >>> signal_name(-9)
    'SIGKILL'
    """
    names = {member.value: member.name for member in signal.Signals}  # most real-time signals have none
    return names.get(-status, f"signal {-status}")


def shell_status(status: int) -> int:
    """The status with which a shell would report it: 128 + n for signal n."""
    return status if status >= 0 else 128 - status
