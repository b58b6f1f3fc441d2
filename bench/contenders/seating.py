"""How our workers join their fleet: as torchrun would have started them, with the strategy from the environment."""

from __future__ import annotations

import os

import torch
from serving import Seat

import argosy


def join(seat: Seat) -> argosy.Fleet:
    torch.set_num_threads(1)
    where, port = seat.store.rsplit(":", 1)
    # As torchrun says it.
    os.environ |= {"RANK": str(seat.rank), "WORLD_SIZE": str(seat.size), "MASTER_ADDR": where, "MASTER_PORT": port}
    os.environ |= {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "bench"}
    if seat.host_id is not None:
        os.environ["ARGOSY_HOST_ID"] = seat.host_id
    return argosy.init(os.environ.get("BENCH_STRATEGY"), run_folder=os.environ["BENCH_RUNS"])
