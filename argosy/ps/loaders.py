"""Which loader a worker gets: its share of every step, or samples by lease."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from argosy.comm.group import Group
from argosy.data.batches import BatchConfig
from argosy.data.cursor import Cursor
from argosy.data.leased import LeasedLoader
from argosy.data.loader import Loader
from argosy.parallel.mesh import Mesh
from argosy.ps.served import Served


class Loaders:
    """Makes the loaders of a job. `told` is called with the samples of each worker when `balance` has changed them.

    `emit` writes an event.
    """

    def __init__(
        self,
        config: BatchConfig,
        cursor: Cursor,
        mesh: Mesh,
        group: Group,
        served: Served | None,
        told: Callable[[list[int]], None],
        emit: Callable[..., None],
    ) -> None:
        self._config, self._cursor, self._mesh, self._group = config, cursor, mesh, group
        self._served, self._told, self._emit = served, told, emit

    def make(self, script: DataLoader[Any], number: int) -> Loader | LeasedLoader:
        """This worker's view of the script's DataLoader. `number` tells it from the job's others."""
        if self._served is not None and self._served.has_leases:
            return self._served.loader(script, self._config, self._cursor, number, self._emit)
        mesh, exchange = self._mesh, self._group.all_numbers
        reader = mesh.reader(self._group.rank)
        return Loader(script, self._config, mesh.readers, reader, self._cursor, exchange, self._told)
