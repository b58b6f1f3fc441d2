"""What goes wrong on the argosy backend is an error that says who and what: `backend_errors.py RANK WORLD PORT`."""

import os
import sys
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import argosy
from argosy.comm.errors import CommError

rank, world, port = (int(word) for word in sys.argv[1:])


def new_group(seconds=20.0):
    """A failed group stays failed, so each mistake has one of its own."""
    return dist.new_group(backend="argosy", timeout=timedelta(seconds=seconds))


def fails(function, *words, kind=CommError, within_seconds=10.0):
    began = time.monotonic()
    try:
        function()
    except kind as error:
        said = str(error)
    else:
        raise AssertionError(f"no error that says {words}")
    assert all(word in said for word in words), f"not all of {words} in: {said}"
    assert time.monotonic() - began < within_seconds


def other_size():
    group = new_group()
    fails(lambda: dist.all_reduce(torch.ones(4 + rank), group=group), "4 f32", "5 f32", "rank")


def other_type():
    group = new_group()
    tensor = torch.ones(4, dtype=torch.float32 if rank == 0 else torch.int64)
    fails(lambda: dist.all_reduce(tensor, group=group), "4 f32", "4 i64")


def other_operation():
    group = new_group()
    tensor = torch.ones(4)
    first, second = (lambda: dist.all_reduce(tensor, group=group)), (lambda: dist.broadcast(tensor, 0, group=group))
    fails(first if rank == 0 else second, "all_reduce", "broadcast")


def nobody_comes():
    """The deadline is the group's, that of the call, or that of the wait; and a future fails as its work does."""
    group, tensor = new_group(1.0), torch.ones(3)
    if rank == 0:
        fails(lambda: dist.all_reduce(tensor, group=group), "all_reduce", within_seconds=5.0)
    dist.barrier()
    group = new_group()
    if rank == 0:
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert not work.is_completed()
        fails(lambda: work.wait(timedelta(seconds=0.5)), within_seconds=5.0)
    dist.barrier()
    group = new_group()
    if rank == 0:
        fails(lambda: dist.barrier(group=group, timeout=timedelta(seconds=0.5)), "barrier", within_seconds=5.0)
    dist.barrier()
    group = new_group(1.0)
    if rank == 0:
        future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
        fails(future.wait, "all_reduce", kind=Exception, within_seconds=5.0)
    dist.barrier()


def nobody_comes_to_the_monitored_barrier():
    group = new_group()
    if rank == 0:
        fails(lambda: group.monitored_barrier(timedelta(seconds=0.5)), "rank 1 did not come", within_seconds=5.0)
    dist.barrier()
    group = new_group()
    if rank == 1:
        fails(lambda: group.monitored_barrier(timedelta(seconds=0.5)), "rank 0 did not come", within_seconds=5.0)
    dist.barrier()


def backward_alone():
    """DDP's C++ passes the error on."""
    group = new_group(2.0)
    model = DistributedDataParallel(nn.Linear(2, 1), process_group=group)
    loss = model(torch.ones(1, 2)).sum()
    if rank == 0:
        fails(loss.backward, "all_reduce", kind=Exception)
    dist.barrier()


def peer_dies():
    group = new_group()
    dist.barrier(group=group)
    if rank == 1:
        os._exit(3)
    fails(lambda: dist.all_reduce(torch.ones(3), group=group), "rank 1", "all_reduce", within_seconds=5.0)


warnings.simplefilter("ignore")
argosy.register_backend()
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("argosy", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))
for scenario in (
    other_size,
    other_type,
    other_operation,
    nobody_comes,
    nobody_comes_to_the_monitored_barrier,
    backward_alone,
    peer_dies,
):
    scenario()
    print(scenario.__name__, flush=True)
