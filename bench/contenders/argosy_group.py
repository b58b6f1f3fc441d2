"""Argosy's own group: tensors that it allocated (`group.empty`), reduced in place, by the algorithm asked for.

Operations that are `in_step` are followed by a barrier each, so that all ranks begin them at once.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from serving import Operation, Seat, serve
from torch_tensors import all_reduce_of, meet

from argosy.comm.config import CommConfig
from argosy.comm.engine import EngineGroup
from argosy.control.secret import Secret


def main() -> None:
    seat = Seat.from_arguments()
    store = meet(seat)
    secret = Secret.from_hex(os.environ["ARGOSY_SECRET"])
    groups: dict[str, EngineGroup] = {}

    def join(algorithm: str) -> EngineGroup:
        if algorithm not in groups:
            config = CommConfig(timeout_seconds=60, algorithm=algorithm)
            groups[algorithm] = EngineGroup.join(
                store, seat.rank, seat.size, config=config, secret=secret, host_id=seat.host_id, name=algorithm
            )
        return groups[algorithm]

    def make(wanted: dict[str, Any]) -> Operation:
        group = join(wanted.get("algorithm", "auto"))
        tensor = group.empty(wanted["bytes"] // 4, dtype=torch.float32)

        def reduce(tensor: torch.Tensor) -> None:
            group.all_reduce(tensor, "sum")
            if wanted.get("in_step"):
                group.barrier()

        return all_reduce_of(tensor, seat.rank, seat.size, reduce, group.barrier)

    def leave() -> None:
        for group in groups.values():
            group.close()

    serve(seat, make, leave)


main()
