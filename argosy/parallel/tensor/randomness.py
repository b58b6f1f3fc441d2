"""Random numbers that agree across ranks where tensors do, and differ where these are divided.

torch's DTensor does this on GPUs, whose generators can be set to an offset; on CPUs every rank draws from its own
generator as it stands. Here the ranks of the axis begin with the same state, so whatever is drawn for a tensor that
all of them have is the same. For a divided one each draws a number, the same again, and from it and its rank makes
the seed of what it draws next: so the numbers of all ranks follow from the one state, which a script may seed, save
and restore as ever (activation checkpointing does).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _random
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from argosy.parallel.tensor.crossing import shard_dim

_ODD = 0x9E3779B9  # its multiples differ modulo 2^32, and a CPU generator takes that many bits of a seed


def begin_together(mesh: DeviceMesh) -> None:
    """Give the ranks of an axis the generator state of its first."""
    group = mesh.get_group()
    first = dist.get_global_rank(group, 0)
    if mesh.device_type != "cpu":
        seed = torch.tensor([torch.initial_seed() % (1 << 62)], device=mesh.device_type)
        dist.broadcast(seed, first, group=group)
        torch.manual_seed(int(seed))
        return
    state = torch.get_rng_state()
    dist.broadcast(state, first, group=group)
    torch.set_rng_state(state)


@contextmanager
def apart(rank: int, generator: torch.Generator | None = None) -> Iterator[None]:
    """Numbers drawn in this block are the rank's own. All ranks enter it."""
    common = int(torch.randint(1 << 32, (), generator=generator))
    if torch.cuda.is_available():
        with torch.random.fork_rng([torch.cuda.current_device()]):
            torch.manual_seed((common + rank * _ODD) % (1 << 32))
            yield
        return
    state = torch.get_rng_state()
    torch.default_generator.manual_seed((common + rank * _ODD) % (1 << 32))
    try:
        yield
    finally:
        torch.set_rng_state(state)


class Tracker(_random._RNGStateTracker):
    """What DTensor asks before it draws on CPUs. It is process-wide, so that models on one axis share it."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh, self._users, self._before = mesh, 0, _random._rng_tracker
        self._use_distribute_region = True

    @classmethod
    def installed(cls, mesh: DeviceMesh) -> Tracker:
        """The tracker of an axis, from now until as many `remove` it."""
        tracker = _random._rng_tracker
        if not isinstance(tracker, cls) or tracker._mesh != mesh:
            tracker = _random._rng_tracker = cls(mesh)
        tracker._users += 1
        return tracker

    def remove(self) -> None:
        """One user less."""
        self._users -= 1
        if not self._users and _random._rng_tracker is self:
            _random._rng_tracker = self._before

    @contextmanager
    def _distribute_region(self, spec: DTensorSpec, generator: torch.Generator | None = None) -> Iterator[None]:
        if spec.mesh == self._mesh and shard_dim(spec.placements[0]) is not None:
            with apart(self._mesh.get_local_rank(), generator):
                yield
        elif generator is not None:  # DTensor has taken it from the call: what is drawn comes from the default one
            state = torch.get_rng_state()
            torch.set_rng_state(generator.get_state())
            try:
                yield
                generator.set_state(torch.get_rng_state())
            finally:
                torch.set_rng_state(state)
        else:
            yield
