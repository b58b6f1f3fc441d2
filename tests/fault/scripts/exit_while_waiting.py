"""Rank 0 fails while one of its threads waits in the engine for rank 1, which never comes."""

import sys
import threading
import time

import torch
import torch.distributed as dist

import argosy
from argosy.comm import CommConfig, EngineGroup

rank, store, how = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2), sys.argv[3]
if how == "future":
    argosy.register_backend()
    dist.init_process_group("argosy", store=store, rank=rank, world_size=2)
    if rank == 0:
        dist.all_reduce(torch.ones(3), async_op=True).get_future()
else:
    group = EngineGroup.join(store, rank, 2, config=CommConfig(timeout_seconds=60), secret=None)
    if rank == 0:
        wait = group.barrier if how == "thread" else lambda: group.receive(torch.ones(3), 1)
        threading.Thread(target=wait, daemon=True).start()
# Rank 1 outlives rank 0: did it end at the same moment, the thread would tell that into the script's own traceback.
time.sleep(1 if rank == 0 else 4)
if rank == 0:
    raise ValueError("the cargo has shifted")
