"""A worker that takes samples by lease and writes down each one it has trained; some end early, as arguments say.

In the end those who are left take a mean.

Arguments: a folder; which end and how (`kill` and `raise`: rank 1; `kill all`; or none); after how many batches. What
rank 1 trains is slow, so that it tells of each batch.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import argosy
from argosy.data.progress import TELL_SECONDS

folder, how, batches = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
fleet = argosy.init()
(folder / f"{os.getpid()}.pid").touch()
loader = fleet.distribute(DataLoader(torch.arange(200), batch_size=2, shuffle=True))
trained = (folder / f"rank{fleet.rank}.trained").open("a", buffering=1)
fleet.mean(0.0)  # all begin together
count = 0
ends = {"kill": [1], "raise": [1], "kill all": [0, 1, 2]}.get(how, [])
for epoch in range(2):
    for batch in loader:
        for sample in batch.tolist():
            print(epoch, sample, file=trained)
        count += 1
        if fleet.rank in ends and count == batches:
            if how == "raise":
                raise ValueError("the cargo has shifted")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.5 * TELL_SECONDS if fleet.rank == 1 else 0.03)
mean = fleet.mean(2.0**fleet.rank, weight=1.0)
(folder / f"rank{fleet.rank}.mean").write_text(str(mean))
served = fleet._served
if served.has_leases:
    ledgers = [served._queues.ledger(f"{loader._name}/{epoch}") for epoch in range(2)]
    (folder / f"rank{fleet.rank}.json").write_text(json.dumps(ledgers))
