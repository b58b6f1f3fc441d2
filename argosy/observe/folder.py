"""The run's folder: where logs and events of one run lie."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

Role = Literal["rank", "server"]
"""What a process of a job is: a worker, which has a rank, or a parameter server."""


def new_run_folder(script: str, base: Path = Path("runs")) -> Path:
    """Make a folder named after the script and the time; two runs never share one."""
    name = f"{Path(script).stem or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        folder = base / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder


def events_file(folder: Path, number: int, role: Role = "rank") -> Path:
    """Where the events of a rank, or of a server, lie."""
    return folder / f"{role}{number}.events.jsonl"


def log_file(folder: Path, number: int, role: Role = "rank") -> Path:
    """Where the output of a rank, or of a server, lies."""
    return folder / f"{role}{number}.log"
