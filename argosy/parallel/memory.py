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
from collections.abc import Mapping
from typing import Final

_TUNED_BY: Final = ("GLIBC_TUNABLES", "MALLOC_")
_ALLOCATORS: Final = ("jemalloc", "tcmalloc", "mimalloc")
_LARGEST: Final = 32 << 20  # of a block that is taken from the heap: glibc allows no more
_MOST_KEPT: Final = (1 << 31) - 1  # at the heap's end, where alone memory is given back
_SMALLEST_GIVEN_BACK: Final = 1 << 18
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def memory_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What a worker's environment needs; nothing, if the user has tuned the allocator or chosen another."""
    if _is_tuned(environment):
        return {}
    settings = {"hugetlb": 1, "trim_threshold": _MOST_KEPT, "mmap_threshold": _LARGEST}
    return {"GLIBC_TUNABLES": ":".join(f"glibc.malloc.{name}={value}" for name, value in settings.items())}


def keep_freed_memory() -> None:
    """The same for this process, save for the size of pages."""
    if _is_tuned(os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST)
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)


def give_freed_memory_back() -> None:
    """The opposite, for models that no worker could hold whole: what is freed is the system's again at once.

    Gathered modules come and go in sizes that leave gaps: a heap that keeps them grew to three times what was in use.
    """
    if _is_tuned(
        {name: value for name, value in os.environ.items() if (name, value) not in memory_variables({}).items()}
    ):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt") and hasattr(library, "malloc_trim"):
        library.mallopt(_M_MMAP_THRESHOLD, _SMALLEST_GIVEN_BACK)
        library.mallopt(_M_TRIM_THRESHOLD, _SMALLEST_GIVEN_BACK)
        library.malloc_trim(0)


def _is_tuned(environment: Mapping[str, str]) -> bool:
    preloaded = environment.get("LD_PRELOAD", "")
    return any(name.startswith(_TUNED_BY) for name in environment) or any(name in preloaded for name in _ALLOCATORS)
