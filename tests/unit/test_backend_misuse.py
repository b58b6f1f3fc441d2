"""The torch backend in a world of one: what it refuses says why, and what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions, ReduceOp

import argosy
from argosy.comm.errors import CommError


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    argosy.register_backend()
    dist.init_process_group("argosy", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.allreduce([ones(2), ones(2)]), "all_reduce takes a list of one tensor, got 2: call it once for"),
        (lambda g: dist.all_reduce(ones(3).to_sparse()), "all_reduce of a torch.sparse_coo tensor .* tensor.to_dense"),
        (lambda g: dist.all_reduce(torch.empty(3, device="meta")), "takes tensors of the CPU and of GPUs, not of meta"),
        (lambda g: dist.all_reduce(ones(3), ReduceOp.BAND), "band works on whole numbers"),
        (lambda g: dist.all_reduce(ones(3).bool(), ReduceOp.AVG), r"all_reduce \(avg\) of torch.bool is not supported"),
        (lambda g: dist.all_reduce(ones(3).to(torch.uint16)), r"all_reduce \(sum\) of torch.uint16 is not supported"),
        (lambda g: dist.all_reduce(ones(3).int(), dist._make_nccl_premul_sum(0.5)), "premul_sum.* not torch.int32"),
        (lambda g: dist.all_gather([ones(2)] * 2, ones(2)), "the output list has 2 tensors, and the group has 1 ranks"),
        (
            lambda g: dist.all_gather([ones(3)], ones(2)),
            r"output list\[0\] has 3 elements and this rank's own tensor has 2",
        ),
        (
            lambda g: dist.all_gather_single(ones(3), ones(2)),
            "the output has 3 elements, and 1 ranks x 2 of the in",
        ),
        (
            lambda g: dist.all_gather_single(ones(2), ones(2).double()),
            "input is torch.float64 and output torch.fl",
        ),
        (
            lambda g: dist.reduce_scatter_single(ones(2), ones(5)),
            "the input has 5 elements, and 1 ranks x 2 of the out",
        ),
        (lambda g: dist.reduce_scatter(ones(2), [ones(3)]), r"input list\[0\] has 3 elements"),
        (lambda g: dist.scatter(ones(2), [ones(2), ones(2)]), "the input list has 2 tensors"),
        (lambda g: dist.all_to_all([ones(2)], [ones(2), ones(2)]), "2 inputs, and the group has 1 ranks"),
        (lambda g: dist.all_to_all_single(*[ones(3)] * 2), "out and the tensor share memory; give it another"),
        (lambda g: dist.all_to_all_single(ones(3), ones(3), [2], [3]), r"output_split_sizes \[2\] must be 1 numbers"),
        (lambda g: g.allgather_coalesced([[ones(2)]], [ones(2), ones(2)]), "takes 1 lists of 2 outputs"),
        (lambda g: g._start_coalescing(torch.device("cpu")), "use _coalescing_manager.* without a device"),
    ],
)
def test_what_it_refuses(group: dist.ProcessGroup, call: Callable[[dist.ProcessGroup], object], message: str) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=message):
        call(group)


def test_a_group_of_one_leaves_tensors_as_they_are(group: dist.ProcessGroup) -> None:
    x, place = torch.arange(6.0).view(2, 3), torch.empty(6)
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
        dist.all_reduce(x.t(), op)
        dist.all_reduce(x, op, async_op=True).wait()
    dist.all_gather_single(place, x)
    group.monitored_barrier(timedelta(seconds=1))
    assert torch.equal(x, torch.arange(6.0).view(2, 3))
    assert torch.equal(place, torch.arange(6.0))


def test_a_parameter_can_be_filled_in_place(group: dist.ProcessGroup) -> None:
    """Autograd does not mind, though it is a leaf and was not contiguous."""
    weight = torch.nn.Parameter(ones(3, 2).t())
    dist.broadcast(weight, 0)
    dist.all_reduce(weight)
    assert torch.equal(weight.detach(), ones(2, 3))


def test_the_result_of_a_future_is_the_tensors(group: dist.ProcessGroup) -> None:
    tensor = ones(3)
    for work in (group.allreduce([tensor]), dist.all_reduce(tensor, async_op=True)):
        assert work.get_future().wait()[0] is tensor
        assert work.result()[0] is tensor
        assert work.is_success()


def test_a_group_that_was_left_says_so(group: dist.ProcessGroup) -> None:
    dist.destroy_process_group()
    at_once = AllreduceOptions()
    at_once.asyncOp = False
    for options in (None, at_once):
        with pytest.raises(CommError, match="all_reduce: this process has left the group"):
            group.allreduce([ones(1)], options)


def test_torchs_native_code_may_wait_for_what_has_ended(group: dist.ProcessGroup) -> None:
    at_once = AllreduceOptions()
    at_once.asyncOp = False
    work = dist.ProcessGroup.allreduce(group, [ones(1)], at_once)  # through the bindings, as C++ calls it
    assert work.wait()


def test_a_secret_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARGOSY_SECRET", "not a secret")
    argosy.register_backend()
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        dist.init_process_group("argosy", store=dist.HashStore(), rank=0, world_size=1)
