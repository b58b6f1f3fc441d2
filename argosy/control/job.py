"""The job as one process sees it: which rank it is, of how many, and where the others are found.

The launcher writes it into a worker's environment and `argosy.init` reads it there. A process that torchrun started
is recognised by torchrun's own variables; one that nobody started as a worker is a job of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from argosy.control.secret import Secret


class JobError(RuntimeError):
    """An environment that describes no job: which variable is wrong, and what to do."""


@dataclass(frozen=True)
class Job:
    """A process's place in its job."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    torchrun: bool = False
    coordinator: str | None = None
    secret: Secret | None = None
    strategy: str | None = None
    run_folder: Path | None = None
    channel: int | None = None

    def environment(self) -> dict[str, str]:
        """The variables that tell a worker its place."""
        values = {
            "ARGOSY_RANK": self.rank,
            "ARGOSY_WORLD": self.world,
            "ARGOSY_LOCAL_RANK": self.local_rank,
            "ARGOSY_LOCAL_WORLD": self.local_world,
            "ARGOSY_COORDINATOR": self.coordinator,
            "ARGOSY_SECRET": self.secret.hex() if self.secret else None,
            "ARGOSY_STRATEGY": self.strategy,
            "ARGOSY_RUN_FOLDER": self.run_folder,
            "ARGOSY_CHANNEL": self.channel,
        }
        return {name: str(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Job:
        """The place that the environment tells.

        >>> Job.from_environment({}).world
        1
        """
        if "ARGOSY_RANK" in environment:
            return cls._from_launcher(environment)
        if "TORCHELASTIC_RUN_ID" in environment:
            return cls(
                rank=_number(environment, "RANK"),
                world=_number(environment, "WORLD_SIZE"),
                local_rank=_number(environment, "LOCAL_RANK"),
                local_world=_number(environment, "LOCAL_WORLD_SIZE"),
                torchrun=True,
            )
        return cls()

    @classmethod
    def _from_launcher(cls, environment: Mapping[str, str]) -> Job:
        folder, channel = environment.get("ARGOSY_RUN_FOLDER"), environment.get("ARGOSY_CHANNEL")
        for name in ("ARGOSY_COORDINATOR", "ARGOSY_SECRET"):
            if name not in environment:
                raise JobError(f"{name} is not set, though ARGOSY_RANK is; start workers with `argosy run`")
        return cls(
            rank=_number(environment, "ARGOSY_RANK"),
            world=_number(environment, "ARGOSY_WORLD"),
            local_rank=_number(environment, "ARGOSY_LOCAL_RANK"),
            local_world=_number(environment, "ARGOSY_LOCAL_WORLD"),
            coordinator=environment["ARGOSY_COORDINATOR"],
            secret=Secret.from_hex(environment["ARGOSY_SECRET"]),
            strategy=environment.get("ARGOSY_STRATEGY"),
            run_folder=Path(folder) if folder else None,
            channel=int(channel) if channel else None,
        )


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except KeyError:
        raise JobError(f"{name} is not set; start workers with `argosy run` or torchrun") from None
    except ValueError:
        raise JobError(f"{name}={environment[name]}: expected a whole number") from None
