"""Cutting a batch into micro-batches along its first dimension, and putting outputs together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch. `weight` is its share of the batch's samples; `x` the model's arguments, `y` the targets."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    y: Any
    samples: int
    weight: float


def arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a batch goes into a model: a tuple or list as its arguments, a dict as its keywords."""
    if isinstance(x, dict):
        return (), dict(x)
    return (tuple(x), {}) if isinstance(x, (list, tuple)) else ((x,), {})


def samples_of(x: Any) -> int:
    """How many samples a batch has: the first dimension of its first tensor."""
    for leaf in pytree.tree_leaves(x):
        if isinstance(leaf, Tensor) and leaf.dim():
            return leaf.shape[0]
    raise TypeError(f"a pipeline cuts a batch along the first dimension of its tensors, and this has none: {type(x)}")


def cut(x: Any, y: Any, count: int) -> list[MicroBatch]:
    """A batch as `count` micro-batches, as equal as can be.

    A batch of fewer samples fills those that are left with its last sample, at weight zero: it costs the time of a
    sample and changes nothing else. An empty batch is made of zeros.

    >>> [(part.samples, part.weight) for part in cut(torch.ones(5, 2), None, 2)]
    [(3, 0.6), (2, 0.4)]
    """
    samples = samples_of(x)
    if y is not None and not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(y)):
        raise TypeError(f"a pipeline cuts targets with their samples, and a {type(y).__name__} has no tensor to be cut")
    sizes = [samples // count + (number < samples % count) for number in range(count)]
    parts, begin = [], 0
    for size in sizes:
        here, weight = (begin, begin + size), size / max(samples, 1)
        args, kwargs = arguments(_taken(x, samples, *here))
        parts.append(MicroBatch(args, kwargs, _taken(y, samples, *here), max(size, 1), weight))
        begin += size
    return parts


def joined(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The outputs of micro-batches as one. What has no dimension of samples is averaged, or is the first one's."""
    trees = [pytree.tree_flatten(output) for output in outputs]
    total = sum(sizes)
    leaves: list[Any] = []
    for group in zip(*(leaves for leaves, _ in trees), strict=True):
        first = group[0]
        if not isinstance(first, Tensor):
            leaves.append(first)
        elif all(leaf.dim() and leaf.shape[0] == size for leaf, size in zip(group, sizes, strict=True)):
            leaves.append(torch.cat(group))
        elif first.is_floating_point():
            leaves.append(sum(leaf * (size / total) for leaf, size in zip(group, sizes, strict=True)))
        else:
            leaves.append(first)
    return pytree.tree_unflatten(leaves, trees[0][1])


def without_samples(output: Any) -> Any:
    """The output of an empty batch: that of the sample which stood in for it is cut off.

    >>> without_samples((torch.ones(1, 3), torch.ones(2)))[0].shape
    torch.Size([0, 3])
    """
    return pytree.tree_map(
        lambda leaf: leaf[:0] if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == 1 else leaf, output
    )


def _taken(value: Any, samples: int, begin: int, end: int) -> Any:
    """Samples of every tensor of a value that has them."""

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != samples:
            return leaf
        if end > begin:
            return leaf[begin:end]
        return leaf[-1:] if samples else leaf.new_zeros((1, *leaf.shape[1:]))

    return pytree.tree_map(take, value)
