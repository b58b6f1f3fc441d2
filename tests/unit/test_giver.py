"""Copies around the caches: the same bytes as any copy gives, wherever they begin and end."""

import random

import torch

from argosy import _native


def test_every_beginning_and_length() -> None:
    source = random.Random(1)
    given = torch.randint(0, 256, (5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    lengths = [*range(200), 255, 256, 257, 4000]
    for begin in range(0, 64, 3):
        for length in lengths:
            offset = source.randrange(64)
            taken = torch.zeros(5000, dtype=torch.uint8)
            _native.copy_around(taken.data_ptr() + begin, given.data_ptr() + offset, length)
            expected = torch.zeros(5000, dtype=torch.uint8)
            expected[begin : begin + length] = given[offset : offset + length]
            assert torch.equal(taken, expected), (begin, length)
