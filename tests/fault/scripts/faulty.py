"""Train until a worker meets its end: `faulty.py FOLDER HOW [RANK]`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import argosy

folder, how, victim = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 1


def mark(name: str) -> None:
    (folder / name).touch()


def innermost() -> None:
    raise ValueError("the cargo has shifted")


def meet_the_end() -> None:
    mark("end")
    if how == "raise":
        innermost()
    elif how == "exit":
        os._exit(3)
    elif how == "sys.exit":
        sys.exit(4)
    elif how == "abort":
        os.abort()
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


mark(f"{os.getpid()}.pid")
child = subprocess.Popen(["sleep", "1000"])  # a worker's own process, which must end with it
mark(f"{child.pid}.pid")
fleet = argosy.init()
if how == "deaf":  # does not end when asked to
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
model, optimizer, loader = fleet.distribute(
    net := nn.Linear(4, 1),
    torch.optim.SGD(net.parameters(), lr=0.01),
    DataLoader(TensorDataset(torch.ones(40, 4), torch.ones(40, 1)), batch_size=2),
)
for epoch in range(1000):
    for step, (x, y) in enumerate(loader):
        fleet.step(x, y, nn.functional.mse_loss)
        if (epoch, step) == (0, 3):
            mark(f"rank{fleet.rank}.trains")
            if fleet.rank == victim:
                meet_the_end()
        time.sleep(0.01)
