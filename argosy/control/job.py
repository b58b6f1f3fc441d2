"""The job as one process sees it: which rank it is, of how many, and where the others are found.

The launcher writes it into a worker's environment and `argosy.init` reads it there. A process of torchrun or of
another launcher that sets torch's variables, is known by these. One that nobody started as a worker is a job of one.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from argosy.control.secret import Secret


class JobError(RuntimeError):
    """An environment that describes no job: which variable is wrong, and what to do."""


@dataclass(frozen=True)
class Job:
    """A process's place in its job. `servers` are those of the parameter server, which have no rank."""

    rank: int = 0
    world: int = 1
    servers: int = 0
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
            "ARGOSY_SERVERS": self.servers or None,
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
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # multiprocessing goes by that, too
            raise JobError(
                "a process that the script has started (one of a DataLoader's, by multiprocessing_context= spawn or "
                "forkserver) imports the script anew, and would join the job; put what the script does, "
                "argosy.init() too, under `if __name__ == '__main__':`"
            )
        if "ARGOSY_RANK" in environment or "ARGOSY_WORLD" in environment:
            return cls._from_launcher(environment)
        if "TORCHELASTIC_RUN_ID" in environment or "MASTER_ADDR" in environment:
            rank, world = _place(environment, "RANK", "WORLD_SIZE")
            return cls(rank, world, torchrun=True)
        return cls()

    @classmethod
    def _from_launcher(cls, environment: Mapping[str, str]) -> Job:
        folder, channel = environment.get("ARGOSY_RUN_FOLDER"), environment.get("ARGOSY_CHANNEL")
        for name in ("ARGOSY_COORDINATOR", "ARGOSY_SECRET"):
            if name not in environment:
                raise JobError(f"{name} is not set, though others are; start workers with `argosy run`")
        try:
            secret = Secret.from_hex(environment["ARGOSY_SECRET"])
        except ValueError as error:
            raise JobError(f"ARGOSY_SECRET is garbled: {error}; start workers with `argosy run`") from None
        rank, world = _place(environment, "ARGOSY_RANK", "ARGOSY_WORLD")
        return cls(
            rank,
            world,
            servers=_number(environment, "ARGOSY_SERVERS") if "ARGOSY_SERVERS" in environment else 0,
            coordinator=environment["ARGOSY_COORDINATOR"],
            secret=secret,
            strategy=environment.get("ARGOSY_STRATEGY"),
            run_folder=Path(folder) if folder else None,
            channel=_number(environment, "ARGOSY_CHANNEL") if channel else None,
        )


def _place(environment: Mapping[str, str], rank: str, world: str) -> tuple[int, int]:
    place, size = _number(environment, rank), _number(environment, world)
    if not 0 <= place < size:
        raise JobError(f"{rank}={place} of {world}={size}: expected 0 to {size - 1}; start workers with `argosy run`")
    return place, size


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except KeyError:
        raise JobError(f"{name} is not set; start workers with `argosy run` or torchrun") from None
    except ValueError:
        raise JobError(f"{name}={environment[name]}: expected a whole number") from None
