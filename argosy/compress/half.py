"""Gradients of 16 bits on the wire: half the bytes, and no memory.

Nothing is kept. Rounding to nearest changes a number by at most 1/256 of it (fp16: 1/2048), to either side alike, so no
part of a gradient is left out for good; error feedback would cost a second copy of it, and as much time again.

[Note: fp16 does not overflow]
fp16 ends at 65,504, and numbers below 6e-8 become zero. So a bucket is multiplied by a power of two, which loses
nothing, such that no sum of all workers' shares can overflow and the largest comes close to it. They agree on it by the
maximum of their shares, one number. A sum that is finite stays finite; one that is not gets there as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final, Literal

import torch

from argosy.comm.engine import EngineGroup
from argosy.comm.pending import Pending
from argosy.compress.codec import Bucket, Codec
from argosy.compress.kept import Scratch

_TYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}
_HIGHEST: Final = 15  # sums are kept below 2^15, so that rounding in between cannot take them to infinity


class HalfCodec(Codec):
    """Sums gradients as `fp16` or `bf16` numbers."""

    keeps = False

    def __init__(self, kind: Literal["fp16", "bf16"]) -> None:
        super().__init__()
        if kind not in _TYPES:
            raise ValueError(f"kind={kind!r}: choose one of {', '.join(_TYPES)}")
        self._type = _TYPES[kind]
        self._scratch = Scratch()

    def steps(self, bucket: Bucket, group: EngineGroup) -> Iterator[Pending]:
        """Sum in 16 bits; the engine adds up in fp32 and rounds what it sends."""
        flat, exponent = bucket.flat, 0
        if not flat.numel():
            return
        if self._type == torch.float16:
            least, greatest = torch.aminmax(flat)
            top = torch.maximum(least.neg(), greatest).reshape(1)
            self.bytes_sent += top.nbytes
            yield group.all_reduce(top, "max", wait=False)
            exponent = _exponent(float(top) * group.size)
        with self._scratch.lend(group) as rooms:
            wire = rooms.take("wire", flat.numel(), self._type)
            wire.copy_(flat.mul_(2.0**exponent) if exponent else flat)
            self.bytes_sent += wire.nbytes
            yield group.all_reduce(wire, wait=False)
            flat.copy_(wire)
        if exponent:
            flat.mul_(2.0**-exponent)


def _exponent(bound: float) -> int:
    """The power of two to multiply by: see [Note: fp16 does not overflow]."""
    if not 0 < bound < math.inf:
        return 0
    return max(-126, min(126, _HIGHEST - math.frexp(bound)[1]))  # both it and its inverse are floats
