"""The torch.distributed backend, in real processes: the same results as Gloo's, and errors that say who and what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from launching import FORKED_PYTHON, Finished, finish, start

SCRIPTS = Path(__file__).parent / "scripts"
DEADLINE_SECONDS = 80

pytestmark = pytest.mark.timeout(100)


def together(script: str, world: int) -> list[Finished]:
    """Run a script on several ranks, which meet at a store of this process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    workers = [
        start(
            [*FORKED_PYTHON, SCRIPTS / script, str(rank), str(world), str(store.port)],
            OMP_NUM_THREADS="1",
            GLOO_SOCKET_IFNAME="lo",
        )
        for rank in range(world)
    ]
    return [finish(worker, DEADLINE_SECONDS) for worker in workers]


def check(finished: list[Finished]) -> None:
    for rank, each in enumerate(finished):
        assert each.status == 0, f"rank {rank}: status {each.status}\n{each.out}\n{each.err}"
        assert f"done {rank}" in each.out


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_operation_gives_what_gloo_gives(world: int) -> None:
    check(together("backend_operations.py", world))


@pytest.mark.parametrize("world", [2, 3])
def test_torchs_ways_to_train_learn_what_they_learn_on_gloo(world: int) -> None:
    check(together("backend_training.py", world))


def test_errors_name_who_and_what() -> None:
    first, second = together("backend_errors.py", 2)
    assert first.status == 0, first.err
    assert first.out.split()[-1] == "peer_dies"
    assert second.status == 3, second.err  # it died in the last scenario, as told
