"""Argosy as a torch.distributed backend: ordinary tensors, the same calls as for Gloo."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from serving import Operation, Seat, serve
from torch_tensors import PATIENCE, all_reduce_of, meet

import argosy


def main() -> None:
    seat = Seat.from_arguments()
    store = meet(seat)
    if seat.host_id is not None:
        os.environ["ARGOSY_HOST_ID"] = seat.host_id
    argosy.register_backend()
    dist.init_process_group("argosy", store=store, rank=seat.rank, world_size=seat.size, timeout=PATIENCE)

    def make(wanted: dict[str, Any]) -> Operation:
        tensor = torch.zeros(wanted["bytes"] // 4, dtype=torch.float32)
        return all_reduce_of(tensor, seat.rank, seat.size, dist.all_reduce, dist.barrier)

    serve(seat, make, leave=dist.destroy_process_group)


main()
