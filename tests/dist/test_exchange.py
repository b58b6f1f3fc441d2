"""Modules that are gathered in memory which all workers have in common: never another's, never too early."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import Place, run

from argosy.comm.backend import ArgosyProcessGroup
from argosy.comm.errors import Mismatch
from argosy.parallel.sharding.exchange import CommonGather

CPU = torch.device("cpu")


def gather_by_turns(place: Place) -> None:
    engine = place.join()
    group = ArgosyProcessGroup(dist.HashStore(), engine, timedelta(seconds=30))
    common, size, rank = CommonGather(engine), engine.size, engine.rank
    held = None
    for turn in range(60):
        count = 3000 if turn % 3 == 0 else 1000
        out = common.allocate((count * size,), dtype=torch.float32, device=CPU)
        mine = out[rank * count : (rank + 1) * count].fill_(10 * turn + rank)
        common(out, mine, group)
        expected = torch.tensor([10.0 * turn + other for other in range(size)])
        assert torch.equal(out.view(size, count), expected[:, None].expand(size, count)), turn
        held = out if rank == 0 else None  # one worker keeps what it has gathered for longer
        del out, mine
    assert held is None or held[0] == 10 * 59
    assert common.allocate((0,), dtype=torch.float32, device=CPU).numel() == 0
    out = common.allocate(((1000 - rank) * size,), dtype=torch.float32, device=CPU)
    with pytest.raises(Mismatch, match="different modules"):
        common(out, out[: 1000 - rank], group)
    engine.drop()


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_gathered_is_whole_and_stays_while_anybody_has_it(size: int) -> None:
    run(gather_by_turns, size)
