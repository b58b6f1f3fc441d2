"""The order of samples: a permutation that is a function of (seed, epoch, position) and of nothing else.

No list of indices is shuffled or stored. A keyed bijection (a Feistel network) maps each position of an epoch to a
sample, so any worker, at any time, on any number of workers, knows what stands at any position.

[Note: why a Feistel network]
Splitting a number's bits into halves (l, r) and replacing them by (r, l ^ f(r, key)) can be undone whatever `f` is,
so a few such rounds are a bijection of 0 .. 4^h - 1, and scramble it if `f` does. Sizes between powers of four
are handled by walking: a result outside the dataset is mapped again until it falls inside. That is a bijection
of the dataset too, since the walk follows the cycles of one; and as the domain is at most four times the dataset,
it takes few steps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from argosy._native import samples_at

_ROUNDS = 6
_MASK = (1 << 64) - 1

Indices = npt.NDArray[np.int64]


def mix(value: int) -> int:
    """Scramble 64 bits (the finaliser of SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def epoch_seed(seed: int, epoch: int) -> int:
    """One number for a seed and an epoch."""
    return mix(mix(seed) ^ epoch)


class Shuffle:
    """A permutation of `0 .. size - 1`, evaluated at any positions without being stored.

    >>> order = Shuffle(5, seed=0, epoch=0)
    >>> sorted(order(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self._size = size
        self._half = max(1, -(-(size - 1).bit_length() // 2)) if size > 1 else 1
        base = epoch_seed(seed, epoch)
        self._keys = [mix(base + number) for number in range(_ROUNDS)]

    def __call__(self, positions: Indices) -> Indices:
        """The samples at these positions."""
        asked = np.ascontiguousarray(positions, dtype=np.int64)
        samples = np.empty_like(asked)
        samples_at(self._size, self._half, self._keys, asked.ctypes.data, asked.size, samples.ctypes.data)
        return samples
