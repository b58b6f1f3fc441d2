"""torch's own groups, formed by real processes through the coordinator."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from argosy.control.client import Client
from argosy.control.coordinator import Coordinator
from argosy.control.secret import Secret
from argosy.control.store import CoordinatorStore

pytestmark = pytest.mark.timeout(90)

WORLD = 3

WORKER = """
import gc, os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from argosy.control.client import Client
from argosy.control.secret import Secret
from argosy.control.store import CoordinatorStore

rank, world = int(sys.argv[1]), int(sys.argv[2])
client = Client(sys.argv[3], Secret.from_hex(os.environ["TEST_SECRET"]), who=f"rank {rank}", timeout_seconds=60.0)

# The store itself is not kept: the client does that.
dist.init_process_group("gloo", store=CoordinatorStore(client, "torch/"), rank=rank, world_size=world)
gc.collect()

total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
assert total.item() == world * (world + 1) / 2

pair = dist.new_group([0, world - 1])
if rank in (0, world - 1):
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=pair)
    assert value.item() == world - 1

mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("replicate", "shard"))
gathered = [torch.empty(1) for _ in range(world)]
dist.all_gather(gathered, torch.tensor([float(rank)]), group=mesh.get_group("shard"))
assert [each.item() for each in gathered] == list(range(world))

parts = [None] * world
dist.all_gather_object(parts, {"rank": rank})
assert parts == [{"rank": each} for each in range(world)]
dist.monitored_barrier(timeout=timedelta(seconds=30))
client.barrier("end", world)
dist.destroy_process_group()
client.close()
print("done", rank)
"""

LONELY = """
import os, sys
from datetime import timedelta
import torch.distributed as dist
from argosy.control.client import Client
from argosy.control.secret import Secret
from argosy.control.store import CoordinatorStore

client = Client(sys.argv[3], Secret.from_hex(os.environ["TEST_SECRET"]))
store = CoordinatorStore(client, "lonely/")
timeout = timedelta(seconds=1)
dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=timeout)
"""


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    running = asyncio.run_coroutine_threadsafe(Coordinator.start(Secret.new()), loop).result(10.0)
    yield running
    asyncio.run_coroutine_threadsafe(running.stop(), loop).result(10.0)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10.0)
    loop.close()


def start(script: str, rank: int, world: int, coordinator: Coordinator) -> subprocess.Popen[str]:
    # Gloo listens where it is told to, and one thread each is plenty for numbers.
    settings = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TEST_SECRET": coordinator.secret.hex()}
    return subprocess.Popen(
        [sys.executable, "-c", script, str(rank), str(world), coordinator.address],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_groups_and_meshes_form_through_the_coordinator(coordinator: Coordinator) -> None:
    workers = [start(WORKER, rank, WORLD, coordinator) for rank in range(WORLD)]
    try:
        for rank, worker in enumerate(workers):
            output, errors = worker.communicate(timeout=60.0)
            assert worker.returncode == 0, errors
            assert output.split() == ["done", str(rank)]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def test_a_rank_that_waits_in_vain_gets_a_readable_error(coordinator: Coordinator) -> None:
    """An exception of ours passes through torch's C++ and comes out as itself."""
    worker = start(LONELY, 0, 2, coordinator)
    try:
        _, errors = worker.communicate(timeout=60.0)
    finally:
        worker.kill()
        worker.wait()
    assert worker.returncode == 1, errors  # an exception, not a signal
    assert "DistStoreError" in errors
    assert "waited 1 s for" in errors
    assert "lonely/" in errors


@pytest.fixture
def client(coordinator: Coordinator) -> Iterator[Client]:
    with Client(coordinator.address, coordinator.secret, timeout_seconds=10.0) as client:
        yield client


def exercise(store: dist.Store) -> list[object]:
    """What torch, and code written for it, does with a store."""
    store.set("text", "a")
    store.set("bytes", b"b")
    store.append("text", "c")
    store.multi_set(["m1", "m2"], ["1", "2"])
    store.set_timeout(timedelta(seconds=0.05))
    seen: list[object] = [
        store.get("text"),
        store.get("bytes"),
        store.add("n", 2),
        store.add("n", 3),
        store.get("n"),
        store.check(["text", "n"]),
        store.check(["text", "never"]),
        store.wait(["text"]),
        store.wait(["text"], timedelta(seconds=1)),
        store.compare_set("c", "expected", "desired"),
        store.compare_set("c", "", "first"),
        store.compare_set("c", "first", "second"),
        store.multi_get(["m1", "m2"]),
        store.has_extended_api(),
        store.delete_key("text"),
        store.delete_key("text"),
        store.timeout,
        store.clone().get("bytes"),
    ]
    for wait in (
        lambda: store.get("never"),
        lambda: store.wait(["never"]),
        lambda: store.wait(["never"], timedelta(seconds=0.01)),
    ):
        with pytest.raises(dist.DistStoreError):
            wait()
    return seen


@pytest.mark.parametrize("nested", [False, True])
def test_it_behaves_as_torchs_own(client: Client, nested: bool) -> None:
    """Directly, and through C++ as torch calls it (inside a `PrefixStore`)."""
    theirs: dist.Store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours: dist.Store = CoordinatorStore(client, "ours/")
    if nested:
        theirs, ours = dist.PrefixStore("in", theirs), dist.PrefixStore("in", ours)
    before = ours.num_keys()
    assert exercise(ours) == exercise(theirs)
    assert ours.num_keys() - before == 5


def test_prefixes_keep_stores_apart(client: Client) -> None:
    first, second = CoordinatorStore(client, "a/"), CoordinatorStore(client, "b/")
    first.set("k", "1")
    second.set("k", "2")
    assert (first.get("k"), second.get("k")) == (b"1", b"2")
    assert client.get("a/k") == b"1"


def test_a_lost_coordinator_is_a_store_error(client: Client) -> None:
    store = dist.PrefixStore("in", CoordinatorStore(client))
    client.close()
    with pytest.raises(dist.DistStoreError, match="client is closed"):
        store.get("k")
