"""Gradients and replicas where a script's batches, gradients or model are not the same in every pass."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
from ranks import Place, run
from together import TINY, Telling, Together, batch, large_net, net, squares
from torch import Tensor, nn

from argosy.parallel.config import ReducerConfig
from argosy.parallel.data import DataParallel


def check_uneven_batches(place: Place, codec: Telling | None) -> None:
    """Each batch's gradient is its own mean, whatever the sizes of the others; a worker may be without a sample."""
    both = Together(place, large_net(), codec=codec)
    for step in range(2):
        for number, shares in enumerate([[3, 5], [0, 2], [6, 1], [1, 0]]):
            both.shares = shares
            both.begin(step=number)
            part = batch(number + step)[: sum(shares)]
            if number < 3:
                both.cursor.loss = 1.0
                with both.parallel.no_sync():
                    squares(both.model, both.mine(part)).backward()
                assert both.cursor.loss is None, "it is told with the step's"
            else:
                squares(both.model, both.mine(part)).backward()
            squares(both.alone, part).backward()
        both.check()
        both.zero_grad()
        both.shares = [2, 6]  # and a step without such passes
        both.backward(squares, batch(7)[:8], step=4)
        both.check()
        both.zero_grad()
    both.parallel.close()


@pytest.mark.parametrize("codec", [None, Telling(), Telling(weighs=True)])
def test_no_sync_weighs_each_batch_by_its_samples(codec: Telling | None) -> None:
    run(check_uneven_batches, 2, codec)


class Tied(nn.Module):
    """A table whose gradient is sparse, unless it is the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table, self.is_tied = nn.Embedding(50, 4, sparse=True), False

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x)
        return rows @ self.table.weight.T if self.is_tied else rows


def check_sparse_in_some_passes(place: Place) -> None:
    both = Together(place, Tied())
    for step, is_tied in enumerate([False, True, False, True]):
        both.model.is_tied = both.alone.is_tied = is_tied
        ids = torch.randint(0, 50, (sum(both.shares), 3), generator=torch.Generator().manual_seed(step))
        both.backward(squares, ids, step=step)
        both.check()
        both.zero_grad()


def test_a_gradient_may_be_sparse_in_some_passes() -> None:
    run(check_sparse_in_some_passes, 2)


def check_sparse_accumulated(place: Place) -> None:
    both = Together(place, Tied())
    both.parallel.close()
    both.parallel = DataParallel(both.model, both.group, both.cursor, 0, TINY, accumulate=3)
    sizes = [[3, 5], [2, 0], [0, 1]]
    for step in range(3):
        for number, shares in enumerate(sizes):
            both.shares = shares
            both.model.is_tied = both.alone.is_tied = step == 2 and number == 1
            ids = torch.randint(0, 50, (sum(shares), 3), generator=torch.Generator().manual_seed(3 * step + number))
            both.begin(merged=11, closes=number == 2, step=number)
            squares(both.model, both.mine(ids)).backward()
            (squares(both.alone, ids) * sum(shares) / 11).backward()
            if number < 2:
                both.model.zero_grad()
        both.check()
        both.zero_grad()


def test_sparse_gradients_of_several_batches_are_added_up() -> None:
    run(check_sparse_accumulated, 2)


def check_thawed_between(place: Place) -> None:
    model = net()
    model[0].requires_grad_(False)
    both = Together(place, model)
    both.parallel.close()
    both.parallel = DataParallel(model, both.group, both.cursor, 0, TINY, accumulate=2)
    both.shares = [4, 4]
    for number in range(2):
        for each in (both.model, both.alone):
            each[0].requires_grad_(number == 1)
        part = batch(number)[:8]
        both.begin(merged=16, closes=number == 1, step=number)
        squares(both.model, both.mine(part)).backward()
        (squares(both.alone, part) / 2).backward()
    both.check()


def test_a_parameter_thawed_between_two_batches_of_a_step_loses_nothing() -> None:
    run(check_thawed_between, 2)


def check_replaced(place: Place) -> None:
    both = Together(place, net())
    torch.manual_seed(place.rank)
    both.model[4] = nn.Linear(30, 2)
    optimizer = torch.optim.SGD(both.model.parameters(), lr=0.1)
    for step in range(2):
        both.begin(step=step)
        squares(both.model, both.mine(batch(step)[: sum(both.shares)])).backward()
        optimizer.step()
    for parameter in both.model.parameters():
        one, other = both.group.all_gather(parameter.detach().clone())
        assert torch.equal(one, other)


def test_a_layer_that_is_replaced_becomes_the_same_on_all_workers() -> None:
    run(check_replaced, 2)


class Assigns(nn.Module):
    """Keeps a mean by assigning another tensor in each pass, as many times as memory may come back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(6):
            self.mean = 0.9 * self.mean + x.mean(0)
        return self.layer(x)


def check_assigned(place: Place) -> None:
    both = Together(place, Assigns())
    for step in range(10):
        both.begin(step=step)
        squares(both.model, both.mine(batch(step)[: sum(both.shares)])).backward()
        one, other = both.group.all_gather(both.model.mean)
        assert torch.equal(one, other), step


def test_buffers_that_a_module_assigns_stay_the_same() -> None:
    run(check_assigned, 2)


def check_copies(place: Place) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    both = Together(place, model, ReducerConfig(sync_batchnorm=True))
    both.begin()
    squares(both.model, both.mine(batch()[: sum(both.shares)])).backward()
    if place.rank == 0:  # a copy is this worker's own: nobody else takes part
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            squares(other, batch()).backward()
            torch.testing.assert_close(other.eval()(batch()), other(batch()))
            assert not torch.equal(other[1].running_mean, model[1].running_mean)
    both.begin(step=1)
    squares(both.model, both.mine(batch(1)[: sum(both.shares)])).backward()


def test_a_model_may_be_copied_and_pickled() -> None:
    run(check_copies, 2)


def check_grown(place: Place) -> None:
    both = Together(place, net(), codec=Telling())
    for step in range(3):
        if step == 1:
            for model in (both.model, both.alone):
                torch.manual_seed(9)
                model.insert(2, nn.Linear(40, 40))
            both.parallel.codec.names.clear()
        both.backward(squares, batch(step)[: sum(both.shares)], step=step)
        both.check()
        both.zero_grad()
    assert set(both.parallel.codec.names) == {name for name, _ in both.model.named_parameters()}


def test_a_codec_knows_parameters_by_the_names_they_have() -> None:
    run(check_grown, 2)


def check_let_go(place: Place) -> None:
    both = Together(place, net())
    replaced = []
    for step in range(3):
        both.begin(step=step)
        with both.parallel.no_sync():
            squares(both.model, both.mine(batch())).backward()
        squares(both.model, both.mine(batch())).backward()
        replaced.append(weakref.ref(both.model[0].weight))
        torch.manual_seed(place.rank)
        both.model[0] = nn.Linear(6, 40).requires_grad_(step != 1)
    both.begin(step=3)
    squares(both.model, both.mine(batch())).backward()
    assert not any(one() for one in replaced)
    assert torch.equal(*both.group.all_gather(both.model[0].weight.detach()))


def test_replaced_parameters_are_let_go() -> None:
    run(check_let_go, 2)


def check_frozen_in_an_open_step(place: Place, accumulate: int) -> None:
    both = Together(place, net())
    both.parallel.close()
    both.parallel = DataParallel(both.model, both.group, both.cursor, 0, TINY, accumulate=accumulate)
    for step in range(3):
        for number in range(2):
            both.begin(merged=16 if accumulate > 1 else None, closes=number == 1 or accumulate == 1, step=number)
            part = batch(number + step)[: sum(both.shares)]
            if number == 0 and accumulate == 1:
                with both.parallel.no_sync():
                    squares(both.model, both.mine(part)).backward()
            else:
                squares(both.model, both.mine(part)).backward()
            (squares(both.alone, part) * (0.5 if accumulate > 1 else 1)).backward()
            for model in (both.model, both.alone):
                model[0].requires_grad_(step != 1 or number == 1)
        both.check()
        both.zero_grad()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_layer_frozen_while_batches_are_added_up_keeps_what_it_has(accumulate: int) -> None:
    run(check_frozen_in_an_open_step, 2, accumulate)


def check_another_type(place: Place) -> None:
    both = Together(place, net())
    for step in range(3):
        whole = batch(step)[: sum(both.shares)]
        if step:
            both.model.double(), both.alone.double()
        both.backward(squares, whole.double() if step else whole, step=step)
        both.check()
        both.zero_grad()


def test_a_model_may_change_its_type() -> None:
    run(check_another_type, 2)


class Branching(nn.Module):
    """A norm that only some workers' batches go through."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor, through: bool) -> Tensor:
        y = self.first(x)
        return self.norm(y) if through else y


def check_counters(place: Place) -> None:
    both = Together(place, Branching())
    for step in range(4):
        both.begin(step=step)
        both.model(torch.randn(6, 4), through=place.rank == 0 or step == 3).square().mean().backward()
        both.zero_grad()
    counts = both.group.all_gather(both.model.norm.num_batches_tracked.reshape(1))
    assert len({int(count) for count in counts}) == 1


def test_layers_that_count_differently_agree() -> None:
    run(check_counters, 2)


def check_dense_then_sparse(place: Place) -> None:
    both = Together(place, Tied(), codec=Telling())
    for step, is_tied in enumerate([True, False, True]):
        both.model.is_tied = both.alone.is_tied = is_tied
        ids = torch.randint(0, 50, (sum(both.shares), 3), generator=torch.Generator().manual_seed(step))
        both.backward(squares, ids, step=step)
        both.check()
        both.zero_grad()


def test_a_gradient_that_a_codec_has_seen_may_become_sparse() -> None:
    run(check_dense_then_sparse, 2)


def check_dense_and_sparse_in_a_step(place: Place) -> None:
    both = Together(place, Tied())
    both.parallel.close()
    both.parallel = DataParallel(both.model, both.group, both.cursor, 0, TINY, accumulate=2)
    ids = torch.arange(2 * sum(both.shares)).reshape(-1, 2)
    both.model.is_tied = True
    both.begin(merged=16, closes=False, step=0)
    squares(both.model, both.mine(ids)).backward()
    both.model.is_tied = False
    both.begin(merged=16, closes=True, step=1)
    with pytest.raises(RuntimeError, match="in some batches of this step, and dense in others"):
        squares(both.model, both.mine(ids)).backward()


def test_a_gradient_is_not_dense_and_sparse_in_a_step() -> None:
    run(check_dense_and_sparse_in_a_step, 2)
