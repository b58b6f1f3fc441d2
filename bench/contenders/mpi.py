"""Any MPI, through mpi4py, in an environment of its own: arrays of numpy's, or memory that MPI itself allocated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from mpi4py import MPI
from serving import Operation, Seat, serve


def main() -> None:
    world = MPI.COMM_WORLD
    seat = replace(Seat.from_arguments(), rank=world.rank)

    def array(wanted: dict[str, Any]) -> Any:
        if wanted.get("memory") == "mpi":
            return np.frombuffer(MPI.Alloc_mem(wanted["bytes"]), dtype=np.float32)
        return np.empty(wanted["bytes"] // 4, dtype=np.float32)

    def make(wanted: dict[str, Any]) -> Operation:
        mine = array(wanted)
        in_place = wanted["way"] == "in place"
        result = mine if in_place else array(wanted)
        given = MPI.IN_PLACE if in_place else mine

        def check() -> None:
            pattern = np.arange(len(mine), dtype=np.float32) % 251
            mine[:] = pattern + world.rank
            world.Allreduce(given, result, op=MPI.SUM)
            if not np.array_equal(result, pattern * world.size + world.size * (world.size - 1) / 2):
                raise AssertionError(f"rank {world.rank}: the sums are wrong")
            mine[:] = 0
            result[:] = 0

        return Operation(lambda: world.Allreduce(given, result, op=MPI.SUM), world.Barrier, check)

    serve(seat, make)


main()
