"""Computing in 16 bits where a virtual machine has AMX and does not tell the shape of its tiles.

There torch's bf16 products end the process ("Illegal instruction"), because oneDNN, which makes them, takes the shape
from the CPU's word (`csrc/tiles.h`). So workers make it use AVX-512 instead, unless the user has chosen. oneDNN reads
the variable when it is first used: `argosy run` starts workers with it, and `argosy.init` sets it for a plain script.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

from argosy._native import tiles_are_hidden

VARIABLE = "ONEDNN_MAX_CPU_ISA"
_WITHOUT_TILES = "AVX512_CORE_FP16"
ADVICE = (
    "the CPU has AMX, but this virtual machine does not tell the shape of its tiles (CPUID 0x1D): bf16 and fp16 are "
    "computed without it, and may be slower than fp32; have the hypervisor pass that page on"
)


def tile_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What a worker's environment needs; nothing, if tiles can be used, there are none, or the user has chosen."""
    chosen = VARIABLE in environment or not tiles_are_hidden()
    return {} if chosen else {VARIABLE: _WITHOUT_TILES}


def avoid_hidden_tiles() -> None:
    """The same for this process, if it has not multiplied anything in oneDNN yet."""
    os.environ.update(tile_variables(os.environ))


def warn_of_hidden_tiles() -> None:
    """Say why 16 bits are no faster here."""
    if tiles_are_hidden():
        warnings.warn(ADVICE, stacklevel=2)
