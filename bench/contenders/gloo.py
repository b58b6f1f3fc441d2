"""torch.distributed over Gloo: ordinary tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from serving import Operation, Seat, serve
from torch_tensors import PATIENCE, all_reduce_of, meet


def main() -> None:
    seat = Seat.from_arguments()
    store = meet(seat)
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.size, timeout=PATIENCE)

    def make(wanted: dict[str, Any]) -> Operation:
        tensor = torch.zeros(wanted["bytes"] // 4, dtype=torch.float32)
        return all_reduce_of(tensor, seat.rank, seat.size, dist.all_reduce, dist.barrier)

    serve(seat, make, leave=dist.destroy_process_group)


main()
