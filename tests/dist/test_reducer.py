"""Gradients after backward are those of one process on the whole batch, whatever model, worker and loop do."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from ranks import Place, run
from together import TINY, Telling, Together, batch, large_net, net, squares
from torch import Tensor, nn
from torch.nn import functional

from argosy.compress.powersgd import PowerSgdCodec
from argosy.parallel.config import ReducerConfig
from argosy.parallel.data import DataParallel


def check_steps(place: Place, make: Callable[[], nn.Module], even: bool) -> None:
    both = Together(place, make())
    both.shares = [4] * place.size if even else both.shares
    whole = batch()[: sum(both.shares)]
    for step in range(4):
        both.backward(squares, whole, step=step)
        both.check()
        # Where the group reduces small ones fastest, and not somewhere else.
        views = {place.view.data_ptr() for place in both.parallel.reducer.places}
        assert step == 0 or all(p.grad.data_ptr() in views for p in both.model.parameters())
        if step != 2:  # then the next gradients are added
            both.zero_grad(set_to_none=step == 0)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("make", [net, large_net])
@pytest.mark.parametrize("even", [True, False])
def test_each_step_has_the_gradients_of_one_process(size: int, make: Callable[[], nn.Module], even: bool) -> None:
    run(check_steps, size, make, even)


def check_overlap(place: Place) -> None:
    """While the first layer's backward pass has not begun, the sum of a large gradient behind it arrives."""
    both = Together(place, large_net(), ReducerConfig())
    both.shares = [4] * place.size
    seen = []

    def wait(*_: object) -> None:
        large = both.model[2].weight
        for _ in range(1000):
            seen.append(torch.allclose(large.grad, both.alone[2].weight.grad, atol=1e-6))
            if seen[-1]:
                return
            time.sleep(0.01)

    for step in range(2):  # the first one finds out the order
        both.begin(step=step)
        whole = batch(step)[: sum(both.shares)]
        squares(both.alone, whole).backward()
        handle = both.model[0].register_full_backward_pre_hook(wait) if step else None
        squares(both.model, both.mine(whole)).backward()
        both.check()
        both.zero_grad()
        if handle is not None:
            handle.remove()
    assert seen[-1]


def test_large_gradients_are_reduced_while_backward_goes_on() -> None:
    run(check_overlap, 2)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.never = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Samples go one way or the other, by their first number: a worker may have those of one way only."""
        upper = x[:, 0] > 0
        outputs = [layer(x[chosen]) for layer, chosen in ((self.first, upper), (self.second, ~upper)) if chosen.any()]
        return torch.cat(outputs) if outputs else x.new_zeros(0, 3, requires_grad=True)


def check_unused(place: Place) -> None:
    both = Together(place, Branches())
    whole = batch()[: sum(both.shares)]
    for step, signs in enumerate(([1.0] * 20, [1.0] * 4 + [-1.0] * 16, [-1.0] * 20)):
        whole[:, 0] = torch.tensor(signs[: len(whole)])
        both.backward(squares, whole, step=step)
        both.check()
        both.zero_grad()


@pytest.mark.parametrize("size", [2, 3])
def test_parameters_that_a_worker_or_nobody_has_used(size: int) -> None:
    run(check_unused, size)


def check_no_sync(place: Place) -> None:
    both = Together(place, net())
    both.shares = [4] * place.size
    first, second = batch(1)[: 4 * place.size], batch(2)[: 4 * place.size]
    both.begin()
    with both.parallel.no_sync():
        squares(both.model, both.mine(first)).backward()
    local = [p.grad.clone() for p in both.model.parameters()]
    told = both.group.all_gather(local[0])
    assert not torch.equal(told[0], told[1])
    both.begin(step=1)
    squares(both.model, both.mine(second)).backward()
    squares(both.alone, first).backward()
    squares(both.alone, second).backward()
    both.check()


def test_no_sync_adds_up_and_reduces_nothing() -> None:
    run(check_no_sync, 2)


def check_accumulated(place: Place) -> None:
    both = Together(place, large_net())
    both.parallel.close()
    both.parallel = DataParallel(both.model, both.group, both.cursor, 0, TINY, accumulate=3)
    sizes = [[3, 5], [2, 2], [1, 0]] if place.size == 2 else [[4, 0, 3], [1, 1, 1], [0, 2, 1]]
    merged = sum(map(sum, sizes))
    for step in range(2):
        for number, shares in enumerate(sizes):
            both.shares = shares
            closes = number == 2
            part = batch(number)[: sum(shares)]
            both.begin(merged=merged, closes=closes, step=number)
            squares(both.model, both.mine(part)).backward()
            (squares(both.alone, part) * sum(shares) / merged).backward()
            if not closes:
                assert all(p.grad is None for p in both.model.parameters())
                both.model.zero_grad(set_to_none=step == 0)
        both.check()
        both.zero_grad()


@pytest.mark.parametrize("size", [2, 3])
def test_accumulated_batches_are_one_large_batch(size: int) -> None:
    run(check_accumulated, size)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.out = nn.Embedding(50, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x))


def check_sparse(place: Place) -> None:
    both = Together(place, Words())
    for step in range(3):
        ids = torch.randint(0, 50, (sum(both.shares), 3), generator=torch.Generator().manual_seed(step))
        both.backward(squares, ids, step=step)
        both.check()
        assert both.model.table.weight.grad.is_sparse
        gathered = both.group.all_gather(both.model.table.weight.grad.to_dense())
        assert all(torch.equal(each, gathered[0]) for each in gathered)
        both.zero_grad()


@pytest.mark.parametrize("size", [2, 3])
def test_sparse_gradients(size: int) -> None:
    run(check_sparse, size)


class Kinds(nn.Module):
    """Types, orders in memory and devices' favourite layouts, in one model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 1))
        self.conv = convolutions.to(memory_format=torch.channels_last)
        self.wide = nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.waves = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        means = self.conv(x).mean((2, 3))
        return means * self.wide.float() * self.waves.abs()


def check_kinds(place: Place) -> None:
    both = Together(place, Kinds())
    whole = torch.randn(sum(both.shares), 3, 5, 5, generator=torch.Generator().manual_seed(0))
    for step in range(2):
        both.backward(squares, whole.to(memory_format=torch.channels_last), step=step)
        both.check()
        both.zero_grad()


def test_types_and_orders_in_memory() -> None:
    run(check_kinds, 2)


def check_thawed(place: Place) -> None:
    model = net()
    model[0].requires_grad_(False)
    both = Together(place, model)
    for step in range(3):
        for each in (both.model, both.alone):
            each[0].requires_grad_(step == 1)
        both.backward(squares, batch()[: sum(both.shares)], step=step)
        both.check()
        both.zero_grad()


def test_parameters_may_be_frozen_and_thawed() -> None:
    run(check_thawed, 2)


def check_norms(place: Place) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(54, 3))
    model.append(nn.BatchNorm1d(3, affine=False, momentum=None))
    both = Together(place, model, ReducerConfig(sync_batchnorm=True))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return functional.cross_entropy(model(x), torch.arange(len(x)) % 3 if len(x) else torch.zeros(0).long())

    for step in range(3):
        whole = torch.randn(sum(both.shares), 2, 5, 5, generator=torch.Generator().manual_seed(step)) + 3
        both.begin(step=step)
        targets = torch.arange(len(whole)) % 3
        functional.cross_entropy(both.model(both.mine(whole)), both.mine(targets)).backward()
        functional.cross_entropy(both.alone(whole), targets).backward()
        both.check(tolerance=2e-6)
        both.zero_grad()
    for mine, theirs in zip(both.model.buffers(), both.alone.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
    both.parallel.close()
    assert "forward" not in vars(both.model[1])
    torch.testing.assert_close(both.model.eval()(whole), both.alone.eval()(whole))


@pytest.mark.parametrize("size", [2, 3])
def test_synchronised_batch_norm_is_that_of_one_process(size: int) -> None:
    run(check_norms, size)


def check_codec(place: Place, weighs: bool) -> None:
    codec = Telling(weighs)
    both = Together(place, large_net(), codec=codec)
    for step in range(2):
        both.backward(squares, batch()[: sum(both.shares)], step=step)
        both.check()
        both.zero_grad()
    wanted = [name for name, _ in both.model.named_parameters()]
    assert sorted(codec.names) == sorted(wanted * 2)
    # Of a matrix that is not moved anyway.
    assert codec.weights == ({1.0, both.shares[place.rank] / sum(both.shares)} if weighs else {1.0})
    both.parallel.close()


@pytest.mark.parametrize("weighs", [False, True])
def test_a_codec_reduces_what_it_is_given(weighs: bool) -> None:
    run(check_codec, 2, weighs)


def check_low_rank(place: Place) -> None:
    both = Together(place, large_net(), codec=PowerSgdCodec(rank=30))
    for step in range(3):
        both.backward(squares, batch(step)[: sum(both.shares)], step=step)
        both.check()
        both.zero_grad()
    both.parallel.close()


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_of_a_few_samples_have_a_low_rank(size: int) -> None:
    run(check_low_rank, size)


def check_compiled(place: Place) -> None:
    both = Together(place, net())
    compiled = torch.compile(both.model, backend="aot_eager")
    for step in range(2):
        both.begin(step=step)
        whole = batch(step)[: sum(both.shares)]
        squares(compiled, both.mine(whole)).backward()
        squares(both.alone, whole).backward()
        torch.nn.utils.clip_grad_norm_(both.model.parameters(), 0.01)
        torch.nn.utils.clip_grad_norm_(both.alone.parameters(), 0.01)
        both.check()
        both.zero_grad()


def test_a_compiled_model_and_clipping_by_the_global_norm() -> None:
    run(check_compiled, 2)


def check_buffers(place: Place) -> None:
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=1.0), nn.Linear(8, 1))
    both = Together(place, model)
    both.parallel.close()
    both.parallel = DataParallel(model, both.group, both.cursor, 0, TINY, accumulate=2)
    both.shares = [4, 4]
    for number in range(2):
        part = batch(number)[:8] + 5
        both.begin(merged=16, closes=number == 1, step=number)
        squares(both.model, both.mine(part)).backward()
    # With momentum 1, the running mean is the last batch's.
    expected = model[0](part).mean(0)
    torch.testing.assert_close(model[1].running_mean, expected, atol=1e-5, rtol=1e-5)
    both.begin(merged=16, closes=False, step=0)
    squares(both.model, both.mine(batch(3)[:8])).backward()  # a step that is broken off
    both.model.zero_grad()
    both.cursor.leave(both, 0)
    both.alone.zero_grad()
    assert all(parameter.grad is None for parameter in both.model.parameters())


def test_accumulated_batches_leave_the_statistics_of_whole_batches() -> None:
    run(check_buffers, 2)
