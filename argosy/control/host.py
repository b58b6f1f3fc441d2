"""Which host a process is on, as far as another can tell: whether it is worth trying to share memory with it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MAX_TEXT: Final = 255


@dataclass(frozen=True)
class HostIdentity:
    """What processes that can map each other's memory have in common.

    `host_id` is what the user has set to say otherwise (ARGOSY_HOST_ID); None if nothing.
    """

    host_id: str | None
    boot: str | None
    pid_namespace: int | None

    @classmethod
    def here(cls, host_id: str | None) -> HostIdentity:
        """That of this process."""
        return cls(host_id, _read_boot_id(), _read_pid_namespace())

    def may_be_near(self, other: HostIdentity) -> bool:
        """Whether it is worth trying to map the other's memory.

        >>> HostIdentity(None, "b", 1).may_be_near(HostIdentity(None, "b", 1))
        True
        >>> HostIdentity("left", "b", 1).may_be_near(HostIdentity(None, "b", 1))
        False
        """
        if self.host_id is not None or other.host_id is not None:
            return self.host_id == other.host_id
        mine, theirs = (self.boot, self.pid_namespace), (other.boot, other.pid_namespace)
        return None not in mine and mine == theirs


def _read_boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:MAX_TEXT]
    except OSError:
        return None


def _read_pid_namespace() -> int | None:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None
