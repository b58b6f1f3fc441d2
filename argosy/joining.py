"""How a process joins the job that it was started for: `argosy.init()`."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

from argosy.comm.config import CommConfig
from argosy.comm.group import Group
from argosy.comm.world import join_world
from argosy.control.job import Job
from argosy.fleet import Fleet
from argosy.observe.folder import new_run_folder
from argosy.optim.tiles import avoid_hidden_tiles
from argosy.parallel.memory import give_freed_memory_back, keep_freed_memory
from argosy.ps.config import PsConfig
from argosy.ps.served import Served
from argosy.strategy import Strategy


def init(strategy: Strategy | str | Path | None = None, *, run_folder: str | Path | None = None) -> Fleet:
    """Join the job that this process was started for; a plain `python train.py` is a job of one worker.

    `strategy` may be given here or on the command line (`argosy run --strategy`), not differently in both.
    `run_folder` is where events go when no launcher has chosen a folder; by default a new one under `runs/`.

    >>> import tempfile, argosy
    >>> fleet = argosy.init("batch=global", run_folder=tempfile.mkdtemp())
    >>> fleet.rank, fleet.world
    (0, 1)
    """
    job = Job.from_environment(os.environ)
    chosen = Strategy.agreed(strategy, job.strategy)
    chosen.check_workers(job.world, job.servers)
    avoid_hidden_tiles()
    (give_freed_memory_back if chosen.stage else keep_freed_memory)()
    with ExitStack() as leaving:
        group = join_world(job, chosen.part(CommConfig), leaving)
        served = Served.join(job, chosen.part(PsConfig), chosen.timeout_seconds, leaving) if job.servers else None
        return Fleet(job, chosen, group, _shared_folder(job, group, run_folder), leaving.pop_all(), served)


def _shared_folder(job: Job, group: Group, given: str | Path | None) -> Path:
    """The run's folder: the launcher's, or the one that rank 0 makes and tells the others."""
    if job.run_folder is not None:
        return job.run_folder
    mine: bytes | None = None
    if group.rank == 0:
        mine = str((Path(given) if given is not None else new_run_folder(sys.argv[0])).absolute()).encode()
    return Path(group.broadcast_bytes(mine).decode())
