"""The line-up: us and our peers, as contenders of an all-reduce and the lines that they have in the tables."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import peers
from crew import Contender
from rounds import Entry

IN_PLACE, THROUGH_TORCH, GLOO = "Argosy, in place", "Argosy, torch backend", "Gloo"
HIERARCHICAL = "Argosy, in place, hierarchical"
# Arrays as anyone has them; and memory that MPI itself allocates, with Intel MPI asked to put it on a heap that the
# ranks share: the counterpart of our `group.empty`. Each in place and not: for large sizes not in place is the faster.
INTEL_ORDINARY = ("Intel MPI, in place", "Intel MPI, into another array")
INTEL_SHARED = ("Intel MPI, shared heap, in place", "Intel MPI, shared heap, into another array")
OPEN_MPI = ("Open MPI, in place", "Open MPI, into another array")
WAYS = ("in place", "into another array")


def argosy_group(name: str = "argosy group") -> Contender:
    """Our own group, for tensors in its memory."""
    return Contender(name, "argosy_group.py", environment=_secret())


def argosy_torch() -> Contender:
    """Us as a backend of torch.distributed."""
    return Contender("argosy torch", "argosy_torch.py", environment=_secret())


def gloo(interface: str) -> Contender:
    """Gloo on a network interface."""
    return Contender("gloo", "gloo.py", environment={"GLOO_SOCKET_IFNAME": interface})


def ours_and_gloo(interface: str, sizes: Sequence[int]) -> list[Entry]:
    """The lines that every setting has."""
    return [
        Entry(IN_PLACE, argosy_group(), sizes),
        Entry(THROUGH_TORCH, argosy_torch(), sizes),
        Entry(GLOO, gloo(interface), sizes),
    ]


def mpi(ranks: int, cores: int, sizes: Sequence[int]) -> tuple[list[Entry], list[str]]:
    """The lines of the MPIs that can be had here, and a note on those that cannot."""
    entries: list[Entry] = []
    notes: list[str] = []
    for make in (_intel_mpi, _open_mpi):
        try:
            entries += make(ranks, ranks > cores, sizes)
        except peers.PeerMissing as error:
            print(f"left out: {error}", flush=True)
            notes.append(f"left out: {error}")
    return entries, notes


def _intel_mpi(ranks: int, crowded: bool, sizes: Sequence[int]) -> list[Entry]:
    programs = peers.intel_mpi()
    # With more ranks than cores its waits must give the core away; of its ways to do so this is the fastest here.
    crowd = {"I_MPI_THREAD_YIELD": "2"} if crowded else {}
    mpiexec = (str(programs / "mpiexec"), "-n", str(ranks))

    def contender(name: str, environment: Mapping[str, str]) -> Contender:
        settings = {"I_MPI_FABRICS": "shm", **crowd, **environment}
        return Contender(name, "mpi.py", str(programs / "python"), mpiexec, settings)

    ordinary, shared = contender("Intel MPI", {}), contender("Intel MPI, shared heap", {"I_MPI_SHM_HEAP": "1"})
    lines = [Entry(label, ordinary, sizes, {"way": way}) for label, way in zip(INTEL_ORDINARY, WAYS, strict=True)]
    return lines + [
        Entry(label, shared, sizes, {"way": way, "memory": "mpi"})
        for label, way in zip(INTEL_SHARED, WAYS, strict=True)
    ]


def _open_mpi(ranks: int, crowded: bool, sizes: Sequence[int]) -> list[Entry]:
    programs = peers.open_mpi()
    words = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks))
    # When it sees that ranks outnumber cores, it yields by itself; told to oversubscribe, it must be told not to.
    yielding = {"OMPI_MCA_mpi_yield_when_idle": "1" if crowded else "0"}
    contender = Contender("Open MPI", "mpi.py", str(programs / "python"), words, yielding)
    return [Entry(label, contender, sizes, {"way": way}) for label, way in zip(OPEN_MPI, WAYS, strict=True)]


def _secret() -> dict[str, str]:
    return {"ARGOSY_SECRET": secrets.token_hex(32)}
