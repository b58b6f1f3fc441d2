"""Embeddings with an open vocabulary, in one process: torch's own results, and what is refused."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import argosy
from argosy.ps import SGD, Adagrad, Adam, lookup

IDS = [3, -7, 1 << 62, 0]


def both(mode: str, rule: Any, optimizer: Any) -> tuple[argosy.Embedding, Any, Any]:
    """An embedding of ours, and torch's with the same rows and an optimizer of its own."""
    ours = argosy.Embedding(5, initializer="normal:1", optimizer=rule, mode=mode)
    rows = argosy.Embedding(5, initializer="normal:1", optimizer=rule)(torch.tensor(IDS)).detach()
    if mode == "none":
        theirs: Any = nn.Embedding(len(IDS), 5)
    else:
        theirs = nn.EmbeddingBag(len(IDS), 5, mode=mode, include_last_offset=False)
    theirs.weight.data.copy_(rows)
    return ours, theirs, optimizer(theirs.parameters())


@pytest.mark.parametrize(
    ("rule", "optimizer"),
    [
        (SGD(lr=0.3), lambda p: torch.optim.SGD(p, lr=0.3)),
        (Adagrad(lr=0.3), lambda p: torch.optim.Adagrad(p, lr=0.3)),
        (Adam(lr=0.03), lambda p: torch.optim.Adam(p, lr=0.03)),
    ],
)
@pytest.mark.parametrize("mode", ["none", "sum", "mean"])
def test_rows_are_trained_as_torch_trains_them(mode: str, rule: Any, optimizer: Any) -> None:
    ours, theirs, steps = both(mode, rule, optimizer)
    numbers = torch.Generator().manual_seed(0)
    for _ in range(5):
        # All ids are there in every step: torch's optimizers move rows without a gradient too.
        places = torch.cat([torch.arange(4), torch.randint(4, (8,), generator=numbers)]).view(4, 3)
        ids = torch.tensor(IDS)[places]
        weight = torch.randn(5, generator=numbers)
        steps.zero_grad()
        for output in (ours(ids), theirs(places)):
            (output * weight).square().mean().backward()
        ours.step()
        steps.step()
    torch.testing.assert_close(ours(torch.tensor(IDS).view(4, 1)).detach().view(4, 5), theirs.weight.detach())


@pytest.mark.parametrize(
    "use",
    [
        lambda rows: torch.cat([rows.flatten(1), torch.ones(len(rows), 3)], 1).square(),
        lambda rows: torch.cat([torch.ones(len(rows), 2), rows[:, 0].flatten(1), rows[:, 1].flatten(1)], 1).square(),
        lambda rows: rows.mul_(2).add_(1).square(),
        lambda rows: rows.sum(),
        lambda rows: rows.transpose(0, 1).flatten(1).square().cumsum(1),
        lambda rows: rows.half().square(),
        lambda rows: rows[1:, :2].square(),
        lambda rows: rows[:0],
    ],
    ids=["columns", "columns of each", "in place", "expanded", "transposed", "half", "a part", "nothing"],
)
@pytest.mark.parametrize("shape", [(4, 3), (2, 2, 3)])
def test_gradients_are_added_up_however_they_lie(use: Any, shape: tuple[int, ...]) -> None:
    ours, theirs, steps = both("none", SGD(lr=0.3), lambda p: torch.optim.SGD(p, lr=0.3))
    places = torch.arange(12).remainder(4).view(shape)
    for output in (ours(torch.tensor(IDS)[places]), theirs(places)):
        assert output.shape == (*shape, 5)
        use(output).sum().backward()
    ours.step()
    steps.step()
    torch.testing.assert_close(ours(torch.tensor(IDS)).detach(), theirs.weight.detach())


@pytest.mark.parametrize("shape", [(), (12,), (0,), (0, 3), (3, 0)])
def test_ids_may_have_any_shape(shape: tuple[int, ...]) -> None:
    ours, theirs, steps = both("none", SGD(lr=0.3), lambda p: torch.optim.SGD(p, lr=0.3))
    places = torch.arange(12)[: torch.Size(shape).numel()].remainder(4).view(shape)
    for output in (ours(torch.tensor(IDS)[places]), theirs(places)):
        assert output.shape == (*shape, 5)
        output.square_().sum().backward()
    ours.step()
    steps.step()
    torch.testing.assert_close(ours(torch.tensor(IDS)).detach(), theirs.weight.detach())


def test_columns_of_a_larger_matrix_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    gaps: list[tuple[int, int]] = []
    native = lookup.native_add_up
    monkeypatch.setattr(lookup, "native_add_up", lambda *all: (gaps.append(all[1:3]), native(*all)))
    words = argosy.Embedding(4)
    for ids in (torch.arange(6).view(2, 3), torch.arange(6)):
        rows = words(ids)
        torch.cat([rows.flatten(1), torch.ones(len(rows), 5)], 1).sin().sum().backward()
    assert gaps == [(3, 17), (1, 9)]


def test_bags_begin_at_offsets() -> None:
    ours, theirs, _ = both("mean", SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1))
    places, offsets = torch.tensor([0, 1, 1, 3, 2]), torch.tensor([0, 3, 3])
    torch.testing.assert_close(ours(torch.tensor(IDS)[places], offsets), theirs(places, offsets).detach())


def test_looking_makes_no_row_and_a_gradient_does() -> None:
    words = argosy.Embedding(4, entry="count:2")
    with torch.no_grad():
        words(torch.arange(100))
    assert words.rows == 0
    for _ in range(2):
        assert words.rows == 0
        words(torch.arange(3)).sum().backward()
        words.step()
    assert words.rows == 3


def test_an_id_is_counted_at_each_of_its_places() -> None:
    words = argosy.Embedding(4, entry="count:3")
    words(torch.tensor([7, 7, 7, 8, 8])).sum().backward()
    words.step()
    assert words.rows == 1


def test_counters_fade_and_rows_go() -> None:
    words = argosy.Embedding(2)
    words(torch.tensor([1, 1, 1, 2]), clicks=torch.tensor([1.0, 0, 0, 0])).sum().backward()
    words.step()
    assert words.shrink(score_below=2.0) == 1  # id 2: one show, no click
    for _ in range(3):
        words.end_day(decay=0.5)
    assert words.shrink(score_below=0.4) == 0  # (3 shows + 1 click) / 8
    assert words.shrink(unseen_days=3) == 1
    assert words.rows == 0


def test_gradients_of_several_batches_make_one_step() -> None:
    once, twice = (argosy.Embedding(2, initializer="zeros", optimizer=Adagrad(lr=1.0)) for _ in range(2))
    ids = torch.tensor([5, 6, 5])
    (2 * once(ids).sum()).backward()
    for _ in range(2):
        twice(ids).sum().backward()
    once.step()
    twice.step()
    assert torch.equal(once(ids), twice(ids))


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    words = argosy.Embedding(2, name="words")
    before = words(torch.tensor([1])).detach().clone()
    (words(torch.tensor([1])) * torch.tensor([1.0, torch.nan])).sum().backward()
    with pytest.raises(FloatingPointError, match="1 gradients of table words are not finite"):
        words.step()
    assert torch.equal(words(torch.tensor([1])).detach(), before)


@pytest.mark.parametrize(
    ("options", "arguments", "said"),
    [
        ({}, (torch.tensor([1.0]),), "takes torch.int64"),
        ({}, (torch.tensor([1]), torch.tensor([0])), "offsets are for bags"),
        ({"mode": "sum"}, (torch.tensor([1]),), "bags are rows of two, or begin at offsets of one"),
        ({"mode": "sum"}, (torch.tensor([1]), torch.tensor([1])), "offsets begin at 0"),
        ({"mode": "sum"}, (torch.tensor([1]), torch.tensor([0, 2])), "offsets begin at 0"),
        ({}, ([1, 2],), "ids are a list; an embedding takes a tensor"),
    ],
)
def test_what_cannot_be_looked_up_is_refused(options: Any, arguments: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        argosy.Embedding(2, **options)(*arguments)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"initializer": "uniform"}, "initializer=uniform"),
        ({"entry": "count:0"}, "entry=count:0"),
        ({"mode": "max"}, "mode='max'"),
        ({"dim": 0}, "dim=0"),
        ({"dim": 1.5}, r"dim=1.5: expected a whole number"),
        ({"dim": "8"}, r"dim=8: expected a whole number, not the text '8'"),
        ({"optimizer": "adam"}, r"optimizer=adam: .* such as argosy.ps.Adagrad\(lr=0.05\)"),
        ({"optimizer": torch.optim.SGD}, r"optimizer=.*SGD.*: .* such as argosy.ps.Adagrad\(lr=0.05\)"),
        ({"optimizer": SGD}, r"optimizer=.*SGD.*: .* such as argosy.ps.Adagrad\(lr=0.05\)"),
        ({"entry": 5}, r"entry=5: expected text"),
        ({"initializer": 0.1}, r"initializer=0.1: expected text"),
    ],
)
def test_tables_that_cannot_be_are_refused_when_they_are_written_down(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        argosy.Embedding(options.pop("dim", 2), **options)


@pytest.mark.parametrize(
    ("mode", "shape", "clicks", "said"),
    [
        ("none", (3,), 2, r"clicks has 2 numbers, and 3 rows come out of embedding 'words': give one for each"),
        ("none", (2, 3), 2, "clicks has 2 numbers, and 6 rows"),
        ("sum", (2, 3), 6, "clicks has 6 numbers, and 2 rows"),
    ],
)
def test_clicks_are_one_for_each_row(mode: Any, shape: tuple[int, ...], clicks: int, said: str) -> None:
    words = argosy.Embedding(2, name="words", mode=mode)
    with pytest.raises(ValueError, match=said):
        words(torch.ones(shape, dtype=torch.int64), clicks=torch.ones(clicks))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"unseen_days": -1}, "unseen_days=-1: days are a whole number, 0 or more"),
        ({"unseen_days": 1.5}, "unseen_days=1.5: days are a whole number"),
        ({"score_below": float("nan")}, "score_below=nan: it must be 0 or more, and finite"),
        ({"score_below": -1.0}, "score_below=-1.0: it must be 0 or more"),
        ({"score_below": 1.0, "click_weight": float("inf")}, "click_weight=inf: it must be 0 or more, and finite"),
    ],
)
def test_rows_go_by_rules_that_can_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        argosy.Embedding(2).shrink(**options)


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_counters_fade_by_a_share(decay: float) -> None:
    with pytest.raises(ValueError, match=r"decay=.*: it is a share, from 0 to 1"):
        argosy.Embedding(2).end_day(decay)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = argosy.Embedding(2, initializer="zeros", optimizer=SGD(lr=1.0))
        self.out = nn.Linear(2, 1)


@pytest.mark.parametrize("distributed", [False, True])
def test_a_copy_of_a_model_looks_at_the_same_rows(distributed: bool) -> None:
    model, ids = Words(), torch.tensor([1, 2])
    with argosy.init(run_folder=tempfile.mkdtemp()) as fleet:
        if distributed:
            fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))
        model.words(ids).sum().backward()
        model.words.step()
        copied = copy.deepcopy(model)
        model.words(ids).sum().backward()
        model.words.step()
        assert copied.words(ids).tolist() == [[-2.0, -2.0]] * 2
        assert not copied.words(ids).requires_grad  # it trains nothing
        with pytest.raises(RuntimeError, match="is a copy, which looks at the rows of the original"):
            copied.words.step()
        assert copied.out.weight is not model.out.weight


def test_a_copy_of_a_model_that_was_not_trained_is_another_one() -> None:
    model, ids = Words(), torch.tensor([1])
    copied = copy.deepcopy(model)
    copied.words(ids).sum().backward()
    copied.words.step()
    assert copied.words(ids).tolist() == [[-1.0, -1.0]]
    assert model.words(ids).tolist() == [[0.0, 0.0]]


def test_tables_alone_are_stepped_by_an_optimizer_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    loader = DataLoader(TensorDataset(torch.tensor([[7], [7]]), torch.zeros(2, 2)), batch_size=1)
    with argosy.init(run_folder=tempfile.mkdtemp()) as fleet:
        _, loader = fleet.distribute(argosy.Embedding(1, initializer="constant:8", optimizer=SGD(lr=0.25)), loader)
        with pytest.raises(RuntimeError, match="where a model is tables alone"):
            fleet.step(torch.tensor([7]), torch.zeros(1, 1), nn.functional.mse_loss)
        fleet.distribute(torch.optim.SGD([{"params": []}]))
        losses = [float(fleet.step(ids[0], y[:, :1], nn.functional.mse_loss)) for ids, y in loader]
    assert losses == [64.0, 16.0]
    assert not [warning for warning in recwarn if "fleet.report" in str(warning.message)]


def test_the_distributed_optimizer_pushes() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = argosy.Embedding(2, optimizer=SGD(lr=0.5))
            self.out = nn.Linear(2, 1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.out(self.words(ids))
            return output

    with argosy.init(run_folder=tempfile.mkdtemp()) as fleet:
        net = Net()
        ids = torch.arange(40)
        loader = DataLoader(TensorDataset(ids, torch.ones(40, 1)), batch_size=8)
        model, _, loader = fleet.distribute(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
        losses = [float(fleet.step(x, y, nn.functional.mse_loss)) for _ in range(8) for x, y in loader]
        assert losses[-1] < losses[0] / 10
        assert model.words.rows == 40
        assert model.words.spec.name == "words"
        with pytest.raises(NotImplementedError, match="checkpoints do not hold tables yet"):
            fleet.save(f"{fleet.run_folder}/net", model)


class Row(nn.Module):
    """A weight and a row, of the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.row = argosy.Embedding(1, initializer="zeros", optimizer=SGD(lr=1.0))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return ((self.weight + self.row(torch.zeros(len(factor), dtype=torch.int64))) * factor[:, None]).mean()


@pytest.mark.parametrize(("accumulate", "wanted"), [(1, -15.0), (2, -7.5)])
def test_zero_grad_drops_gradients_of_tables_too(accumulate: int, wanted: float) -> None:
    with argosy.init(f"accumulate={accumulate}", run_folder=tempfile.mkdtemp()) as fleet:
        factors = torch.tensor([1.0, 2.0, 4.0, 8.0])
        net = Row()
        loader = DataLoader(TensorDataset(factors), batch_size=1)
        net, steps, loader = fleet.distribute(net, torch.optim.SGD(net.parameters(), lr=1.0), loader)
        for (factor,) in loader:
            if accumulate == 1:
                net(factor * 100).backward()  # and given up
            steps.zero_grad()
            net(factor).backward()
            steps.step()
        assert float(net.weight) == wanted
        assert float(net.row(torch.tensor([0])).detach()) == wanted


def test_gradients_that_are_not_finite_may_be_left_out_and_are_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    with argosy.init("ps=sync not_finite=count", run_folder=tempfile.mkdtemp()) as fleet:
        net = Row()
        net, steps = fleet.distribute(net, torch.optim.SGD([net.weight], lr=0.0))
        for factor in (1.0, float("nan"), 2.0):
            steps.zero_grad()
            net(torch.tensor([factor])).backward()
            steps.step()
        assert float(net.row(torch.tensor([0])).detach()) == -3
    assert "were left out: 1" in capfd.readouterr().err


def test_ids_in_memory_that_is_used_again_are_looked_up_anew() -> None:
    buffer = np.array([1, 2])
    ids = torch.from_numpy(buffer)
    table = argosy.Embedding(1, initializer="zeros", optimizer=SGD(lr=1.0))
    table(ids).sum().backward()
    table.step()
    assert table(ids).flatten().tolist() == [-1.0, -1.0]
    buffer[:] = [7, 2]  # as loaders with buffers of their own do: torch does not see it
    assert table(ids).flatten().tolist() == [0.0, -1.0]
    ids.data.copy_(torch.tensor([2, 9]))
    assert table(ids).flatten().tolist() == [-1.0, 0.0]
