"""Memory that a step frees stays with the process, unless the user has other ideas."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from argosy.parallel.memory import memory_variables

# Whether a large block comes from the heap, where it stays; and a step's allocations, freed each time: how often the
# system had to hand out a page.
STEPS = """
import resource, sys
import torch
from argosy.parallel.memory import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
block = torch.ones(5_000_000)
heap = [line.split()[0].split("-") for line in open("/proc/self/maps") if "[heap]" in line]
in_heap = any(int(begin, 16) <= block.data_ptr() < int(end, 16) for begin, end in heap)
def step():
    blocks = [torch.ones(2_000_000) for _ in range(12)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(in_heap, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
TOUCHED_PAGES = 10 * 12 * 8_000_000 // 4096


def steps(how: str, **environment: str) -> tuple[bool, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GLIBC_", "MALLOC_"))}
    command = [sys.executable, "-c", STEPS, how]
    done = subprocess.run(
        command, env=clean | environment, capture_output=True, text=True, timeout=60, check=True, cwd="/"
    )
    in_heap, faults = done.stdout.split()
    return in_heap == "True", int(faults)


@pytest.mark.skipif("glibc" not in os.confstr("CS_GNU_LIBC_VERSION"), reason="another C library")  # type: ignore[operator]
def test_what_a_step_frees_is_there_for_the_next_one() -> None:
    assert not steps("leave")[0], "otherwise there is nothing to gain"
    for in_heap, faults in (steps("keep"), steps("leave", **memory_variables({}))):
        assert in_heap
        assert faults < TOUCHED_PAGES / 20


def test_who_has_tuned_malloc_is_left_alone() -> None:
    for name, value in (
        ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0"),
        ("MALLOC_TRIM_THRESHOLD_", "1000000"),
        ("LD_PRELOAD", "/usr/lib/libjemalloc.so.2"),
    ):
        assert memory_variables({name: value}) == {}
    assert "GLIBC_TUNABLES" in memory_variables({"LD_PRELOAD": "/usr/lib/libasan.so"})
    assert not steps("keep", MALLOC_MMAP_THRESHOLD_="1000000")[0]
