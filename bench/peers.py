"""The peers' environments: made when they are first needed, each in a folder of its own, kept for the next run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "build" / "peers"
INSTALL_SECONDS = 600


class PeerMissing(Exception):
    """A peer cannot be measured here; the text says why."""


def intel_mpi() -> Path:
    """The folder of Intel MPI's programs."""
    programs = environment("intel-mpi", ["impi-rt", "mpi4py", "numpy"])
    if not (programs / "mpiexec").exists():
        raise PeerMissing(f"Intel MPI: no mpiexec in {programs}")
    return programs


def open_mpi() -> Path:
    """The folder of the Python that runs Open MPI's ranks; mpirun is the system's."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        raise PeerMissing("Open MPI: no mpirun on this machine")
    version = subprocess.run([mpirun, "--version"], check=False, capture_output=True, text=True, timeout=30).stdout
    if "Open MPI" not in version:
        raise PeerMissing(f"Open MPI: {mpirun} is of another MPI")
    return environment("open-mpi", ["mpi4py", "numpy"])


def environment(name: str, packages: list[str]) -> Path:
    """The bin folder of an environment with some packages."""
    folder = FOLDER / name
    programs, ready = folder / "bin", folder / ".ready"
    if not ready.exists():
        # What a broken attempt left behind would look installed.
        shutil.rmtree(folder, ignore_errors=True)
        print(f"installing {', '.join(packages)} into {folder}", flush=True)
        try:
            _run([sys.executable, "-m", "venv", str(folder)])
            _run([str(programs / "pip"), "--disable-pip-version-check", "install", "--quiet", *packages])
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            raise PeerMissing(f"{name} cannot be installed: {said.strip().splitlines()[-1]}") from None
        ready.touch()
    return programs


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
