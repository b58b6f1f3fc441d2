"""Argosy as a torch.distributed backend: ordinary tensors, the same calls as for Gloo."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from serving import Operation, Seat, serve
from torch_tensors import all_reduce_of

import argosy


def main() -> None:
    seat = Seat.from_arguments()
    torch.set_num_threads(1)
    where, port = seat.store.rsplit(":", 1)
    patience = timedelta(seconds=60)
    store = dist.TCPStore(where, int(port), seat.size, is_master=seat.rank == 0, timeout=patience)
    if seat.host_id is not None:
        os.environ["ARGOSY_HOST_ID"] = seat.host_id
    argosy.register_backend()
    dist.init_process_group("argosy", store=store, rank=seat.rank, world_size=seat.size, timeout=patience)

    def make(wanted: dict[str, Any]) -> Operation:
        tensor = torch.zeros(wanted["bytes"] // 4, dtype=torch.float32)
        return all_reduce_of(tensor, seat.rank, seat.size, dist.all_reduce, dist.barrier)

    serve(seat, make, leave=dist.destroy_process_group)


main()
