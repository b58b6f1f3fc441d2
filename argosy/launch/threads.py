"""How many cores there are, and how many threads each worker may use so that workers do not fight over them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def available_cores(cgroup: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores this process may use: those it may run on, or a container's share of them if that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cgroup.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no such limit on this system
    return cores


def threads_per_worker(workers: int, cores: int) -> int:
    """An equal part of the cores, at least one.

    >>> threads_per_worker(workers=4, cores=10)
    2
    """
    return max(1, cores // workers)


def thread_variables(threads: int | None, workers: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that limit a worker's threads. What the user has set stays, unless `threads` is asked for."""
    count = str(threads or threads_per_worker(workers, available_cores()))
    return {name: count for name in VARIABLES if threads or name not in environment}
