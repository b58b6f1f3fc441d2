"""AMX on a virtual machine that has it and hides the shape of its tiles: measured as if the shape were told.

torch's bf16 products end the process there (`argosy/optim/tiles.py`). What the CPU is worth can be measured all the
same, with the missing word put in by a library that is preloaded (`tiles.c`).
"""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
from pathlib import Path

from argosy._native import tiles_are_hidden

TOLD = "this virtual machine hides the shape of AMX's tiles; bench/tiles.c tells it"


def tiles_told() -> dict[str, str]:
    """What a contender's environment needs so that it can use AMX; nothing, where none is hidden or can be told."""
    flags = set(Path("/proc/cpuinfo").read_text(encoding="ascii").split())
    compiler = shutil.which("cc")
    if not tiles_are_hidden() or "cpuid_fault" not in flags or compiler is None:
        return {}
    folder = tempfile.mkdtemp(prefix="argosy-bench-")
    atexit.register(shutil.rmtree, folder)
    library = Path(folder) / "tiles.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    return {"LD_PRELOAD": str(library)}
