"""The mesh: how many workers stand along each axis of parallelism.

Data parallelism is the one axis so far; an axis left out takes the workers that remain.
"""

from __future__ import annotations

from dataclasses import dataclass

from argosy.config import Config, ConfigError


@dataclass(frozen=True)
class MeshConfig(Config):
    """Workers per axis. `data=None` means all of them.

    >>> MeshConfig().data_size(workers=4)
    4
    """

    data: int | None = None

    def check(self) -> None:
        """Refuse sizes that no job could have."""
        if self.data is not None and self.data < 1:
            raise ConfigError("data", self.data, "an axis has at least 1 worker; leave it out to use all workers")

    def data_size(self, workers: int) -> int:
        """The size of the data axis in a job of `workers`; an error if the mesh does not fit them."""
        if self.data is not None and self.data != workers:
            raise ConfigError(
                "data",
                self.data,
                f"the mesh needs {self.data} workers and the job has {workers}; "
                f"say data={workers}, leave data out, or start {self.data} workers",
            )
        return workers
