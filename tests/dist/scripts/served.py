"""A worker of a job with servers, which does what its first argument says; it tells in files what it has seen."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import argosy
from argosy.comm.sockets import JoinError
from argosy.control.client import Client
from argosy.control.job import Job
from argosy.control.secret import Secret
from argosy.ps.card import ServerCard, card_key
from argosy.ps.door import PUSHES
from argosy.ps.joining import connect

how, folder = sys.argv[1], Path(sys.argv[2])
fleet = argosy.init()
client = fleet._served.client


def wrong_secret() -> str:
    """What a worker of another job is told that knocks at a server of this one."""
    job = Job.from_environment(os.environ)
    with Client(job.coordinator, job.secret) as coordinator:
        card = ServerCard.parse(0, coordinator.get(card_key(0)))
    try:
        connect(card, Secret.new(), 0, PUSHES, time.monotonic() + 10).close()
    except JoinError as error:
        return str(error)
    return "let in"


told = {"rank": fleet.rank, "shared": client.shared if hasattr(client, "shared") else None}
if how == "train":
    told["refused"] = wrong_secret()
    loader = fleet.distribute(DataLoader(torch.arange(50), batch_size=4, shuffle=True))
    told["loader"] = type(loader).__name__
    told["samples"] = [sample for batch in loader for sample in batch.tolist()]
(folder / f"rank{fleet.rank}.json").write_text(json.dumps(told))
if how == "wait":
    (folder / f"{fleet.rank}.waits").touch()
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            client.flush(30.0)
            time.sleep(0.02)
    except argosy._native.PsError as error:
        (folder / f"{fleet.rank}.error").write_text(str(error))
        raise
