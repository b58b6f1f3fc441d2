"""What is to be started: what a user said to `argosy run`, checked before anything is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from argosy.control.client import parse_address
from argosy.control.secret import Secret
from argosy.strategy import Strategy


@dataclass(frozen=True)
class Launch:
    """What to start. `workers` and `servers` are those of this node."""

    script: str
    arguments: list[str] = field(default_factory=list)
    workers: int = 1
    servers: int = 0
    nodes: int = 1
    node_rank: int = 0
    coordinator: str | None = None
    strategy: Strategy | None = None
    secret: Secret | None = None
    threads: int | None = None
    run_folder: Path | None = None

    @property
    def chosen(self) -> Strategy:
        """The strategy given on the command line, or the default one."""
        return self.strategy or Strategy()

    def check(self) -> None:
        """Refuse what cannot run, before anything is started."""
        if self.workers < 1:
            raise ValueError(f"--workers {self.workers}: a job has at least 1 worker")
        if self.servers < 0:
            raise ValueError(f"--servers {self.servers}: a job has 0 servers or more")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads {self.threads}: a worker has at least 1 thread")
        if self.nodes < 1 or not 0 <= self.node_rank < self.nodes:
            raise ValueError(f"--node-rank {self.node_rank} of --nodes {self.nodes}: expected 0 to {self.nodes - 1}")
        if not Path(self.script).is_file():
            raise ValueError(f"{self.script}: there is no such script")
        if self.nodes == 1:
            self.chosen.check_workers(self.workers, self.servers)
        elif self.coordinator is None:
            raise ValueError(f"--nodes {self.nodes} needs --coordinator HOST:PORT, an address of node 0")
        elif self.secret is None:
            raise ValueError(
                f"--nodes {self.nodes} needs a secret that all nodes share: make one with `argosy secret job.secret`, "
                f"copy it to each node, and give --secret-file job.secret"
            )
        if self.coordinator is not None:
            try:
                host, _ = parse_address(self.coordinator)
            except ValueError:
                host = ""
            if host in ("", "0.0.0.0", "::"):  # noqa: S104 - it is refused
                fix = "expected HOST:PORT, the address by which all nodes reach node 0, such as 10.0.0.1:29500"
                raise ValueError(f"--coordinator {self.coordinator}: {fix}")
