"""The mesh: which worker does what.

Axes, outermost first: pipeline, data, shard, tensor. Neighbours along the innermost one talk most, in every layer, so
workers are sorted by host before they are laid out: tensor neighbours share a host wherever that is possible.

Samples are divided over data x shard. Workers that differ along tensor or pipeline only are one *reader*: they see the
same samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch.distributed.device_mesh import DeviceMesh

from argosy.parallel.mesh_config import Sizes

AXES: Final = ("pipeline", "data", "shard", "tensor")
_ROWS: Final = 20  # of a picture; the middle of a larger one is left out


@dataclass(frozen=True)
class Mesh:
    """The workers of a job, laid out. `order` has their ranks, the last axis running fastest.

    >>> mesh = Mesh.of(Sizes(data=2, tensor=2), hosts=[0, 1, 0, 1])
    >>> mesh.order, mesh.reader(3)
    ((0, 2, 1, 3), 1)
    """

    sizes: Sizes
    order: tuple[int, ...]
    hosts: tuple[int, ...]  # of each rank

    @classmethod
    def of(cls, sizes: Sizes, hosts: Sequence[int]) -> Mesh:
        """The mesh of workers on these hosts."""
        assert sizes.workers == len(hosts)
        return cls(sizes, tuple(sorted(range(len(hosts)), key=lambda rank: (hosts[rank], rank))), tuple(hosts))

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return tuple(getattr(self.sizes, axis) for axis in AXES)

    @property
    def readers(self) -> int:
        """Among how many the samples of a step are divided."""
        return 1 if self.sizes.turns else self.sizes.data * self.sizes.shard

    def reader(self, rank: int) -> int:
        """Whose share of the samples a worker sees."""
        if self.sizes.turns:
            return 0
        _, data, shard, _ = self.place(rank)
        return data * self.sizes.shard + shard

    def place(self, rank: int) -> tuple[int, ...]:
        """Where a worker stands, along each axis; in a pipeline of unequal stages, the stage and the turn."""
        position = self.order.index(rank)
        if self.sizes.turns:
            ends = list(itertools.accumulate(self.sizes.turns))
            stage = next(stage for stage, end in enumerate(ends) if position < end)
            return stage, position - (ends[stage] - self.sizes.turns[stage])
        return tuple(int(place) for place in torch.unravel_index(torch.tensor(position), self.shape))

    def on_torch(self, device: str, *, always: tuple[str, ...] = ()) -> DeviceMesh:
        """The same as torch's DeviceMesh, of the axes that have several workers, and of those in `always`."""
        axes = [axis for axis in AXES if getattr(self.sizes, axis) > 1 or axis in always]
        shape = [getattr(self.sizes, axis) for axis in axes]
        return DeviceMesh(device, torch.tensor(self.order).view(shape), mesh_dim_names=tuple(axes))

    def picture(self) -> list[str]:
        """Which rank does what, in lines for the user; nothing if workers differ by their samples only."""
        if self.sizes.turns:
            return self._picture_of_turns()
        if self.sizes.data == self.sizes.workers:
            return []
        stages, inner = range(self.sizes.pipeline), "tensor" if self.sizes.tensor > 1 else "shard"
        outer = [axis for axis in ("data", "shard") if axis != inner and getattr(self.sizes, axis) > 1]
        grid = torch.tensor(self.order).view(self.sizes.pipeline, -1, getattr(self.sizes, inner))
        rows = [["", *(f"stage {stage}" for stage in stages)]] if len(stages) > 1 else []
        if grid.shape[2] > 1:
            rows.append(["", *(f"{inner} {_columns(range(grid.shape[2]), self.order)}" for _ in stages)])
        places = itertools.product(*(range(getattr(self.sizes, axis)) for axis in outer))
        for row, place in enumerate(places):
            label = "  ".join(f"{axis} {number}" for axis, number in zip(outer, place, strict=True))
            head = "rank".ljust(len(inner) if grid.shape[2] > 1 else 4)
            rows.append([label, *(f"{head} {_columns(grid[stage, row].tolist(), self.order)}" for stage in stages)])
        if len(rows) > _ROWS:
            rows[_ROWS // 2 : -_ROWS // 2] = [["...", *("" for _ in stages)]]
        crossing = [f"tensor neighbours on different hosts: {told}"] if (told := self._crossing()) else []
        return [f"mesh of {self.sizes.workers} workers = {self.sizes}", *_aligned(rows), *crossing]

    def _picture_of_turns(self) -> list[str]:
        ranks = iter(self.order)
        rows = [
            [f"stage {stage}", f"rank{'s' if count > 1 else ''} {', '.join(str(next(ranks)) for _ in range(count))}"]
            for stage, count in enumerate(self.sizes.turns)
        ]
        return [f"mesh of {self.sizes.workers} workers: {self.sizes}, replicas of a stage take turns", *_aligned(rows)]

    def _crossing(self) -> str:
        """Which groups of tensor neighbours do not share a host."""
        size = self.sizes.tensor
        groups = [self.order[begin : begin + size] for begin in range(0, len(self.order), size)]
        apart = [group for group in groups if len({self.hosts[rank] for rank in group}) > 1]
        return "; ".join(", ".join(map(str, group)) for group in apart)


def _columns(values: Sequence[int], order: Sequence[int]) -> str:
    width = len(str(max(order)))
    return " ".join(f"{value:>{width}}" for value in values)


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
