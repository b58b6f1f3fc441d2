"""The run's folder: where logs and events of one run lie."""

from __future__ import annotations

import time
from pathlib import Path


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


def events_file(folder: Path, rank: int) -> Path:
    """Where a rank's events lie."""
    return folder / f"rank{rank}.events.jsonl"


def log_file(folder: Path, rank: int) -> Path:
    """Where a rank's output lies."""
    return folder / f"rank{rank}.log"
