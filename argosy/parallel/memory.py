"""What the C library does with the memory that a training step frees.

A step allocates and frees its gradients, and as much again for activations. By default glibc gives such memory back to
the system, which hands it out anew page by page and zeroed in the next step: of the step of an MLP with 25 million
parameters this was a third (one process: 156 ms; 109 ms if memory is kept, 94 ms in pages of 2 MiB). So workers keep
what they have had: blocks of up to 32 MiB, the most that glibc allows, of the main thread, where backward runs on a
CPU. Pages of 2 MiB, for which a process must be started with the setting, come with `argosy run`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch.optim import Optimizer

_TUNED_BY: Final = ("GLIBC_TUNABLES", "MALLOC_")
_ALLOCATORS: Final = ("jemalloc", "tcmalloc", "mimalloc")
_LARGEST: Final = 32 << 20  # of a block that is taken from the heap: glibc allows no more
_MOST_KEPT: Final = (1 << 31) - 1  # at the heap's end, where alone memory is given back
_SMALLEST_GIVEN_BACK: Final = 1 << 18
_PLENTY: Final = 32
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def memory_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What a worker's environment needs; nothing, if the user has tuned the allocator or chosen another."""
    if _is_tuned(environment):
        return {}
    settings = {"hugetlb": 1, "trim_threshold": _MOST_KEPT, "mmap_threshold": _LARGEST}
    return {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{name}={value}" for name, value in settings.items())}


def keep_freed_memory() -> None:
    """The same for this process, save for the size of pages."""
    _set(_LARGEST, _MOST_KEPT)


def give_freed_memory_back() -> None:
    """The opposite, while a model that no worker could hold whole is set up: what is freed is the system's again."""
    library = _set(_SMALLEST_GIVEN_BACK, _SMALLEST_GIVEN_BACK)
    if library is not None:
        library.malloc_trim(0)


def available_bytes() -> float:
    """Memory that this process could still have: the host's, or what its container is allowed."""
    told = [_available_on_host(), _available_in_container()]
    return min(known for known in told if known is not None)


def is_plenty(size_bytes: int) -> bool:
    """Whether there is so much memory that so many bytes more do not matter.

    A step of sharded modules that is handed out its pages anew takes up to half as long again as one that has kept
    them, and keeping them takes once or twice as much memory as the parameters would on each worker.
    """
    return size_bytes * _PLENTY <= available_bytes()


def keep_from_the_second_step(optimizer: Optimizer, others: set[Optimizer]) -> Callable[[], None]:
    """Keep what steps free once an optimizer and the `others` have made their first; returns what ends the waiting.

    By then all that lasts is there, in blocks of its own. Were freed memory kept from the beginning, the optimizer's
    states would lie in the gaps between gathered modules, which then fit nowhere: a heap grew to three times what was
    in use. So it is twice, as activations get into the gaps; see `is_plenty`.
    """

    def stepped(*_: object) -> None:
        if optimizer in others:
            others.discard(optimizer)
            if not others:
                keep_freed_memory()

    others.add(optimizer)
    return optimizer.register_step_post_hook(stepped).remove


def _set(mmap_threshold: int, trim_threshold: int) -> ctypes.CDLL | None:
    """Tell the C library; None if it cannot be told, or was by the user."""
    library = ctypes.CDLL(None)
    ours = memory_variables({}).items()
    others = {name: value for name, value in os.environ.items() if (name, value) not in ours}
    if _is_tuned(others) or not hasattr(library, "mallopt"):  # other C libraries have none
        return None
    library.mallopt(_M_MMAP_THRESHOLD, mmap_threshold)
    library.mallopt(_M_TRIM_THRESHOLD, trim_threshold)
    return library


def _is_tuned(environment: Mapping[str, str]) -> bool:
    preloaded = environment.get("LD_PRELOAD", "")
    return any(name.startswith(_TUNED_BY) for name in environment) or any(name in preloaded for name in _ALLOCATORS)


def _available_on_host() -> float | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def _available_in_container() -> float | None:
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        return None if limit == "max" else float(limit) - float((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
