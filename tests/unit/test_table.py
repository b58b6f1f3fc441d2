"""Native embedding tables against a dictionary of rows and against torch.optim."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table_reference import PlainTable, Rows
from torch import Tensor

from argosy import _native
from argosy.ps import FTRL, SGD, Adagrad, Adam, AdamW, Momentum, RMSProp, RowRule, table_config

pytestmark = pytest.mark.usefixtures("one_torch_thread")
ISAS = _native.instruction_sets()
NAN, INF = float("nan"), float("inf")


def random_ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(seed)).unique()


# What a user of many ids does, in any order.
ids_lists = st.lists(st.integers(-3, 3) | st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40, unique=True)
actions = st.one_of(
    st.tuples(st.just("push"), ids_lists, st.integers(0, 2**20)),
    st.tuples(st.just("pull"), ids_lists, st.just(0)),
    st.tuples(st.just("end_day"), st.just([0]), st.just(0)),
    st.tuples(st.just("shrink"), st.just([0]), st.integers(0, 3)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(actions, max_size=30), st.integers(1, 3), st.sampled_from([1, 3, 8, 17]))
def test_a_table_is_a_dictionary_of_rows(todo: list[tuple[str, list[int], int]], count: int, dim: int) -> None:
    plain, table = PlainTable(dim, 0.1, count), Rows(table_config(dim, Adagrad(0.1), entry=f"count:{count}"))
    for what, ids, number in todo:
        if what == "push":
            generator = torch.Generator().manual_seed(number)
            gradients = torch.randn(len(ids), dim, generator=generator)
            if number % 5 == 0:
                gradients[number % len(ids), number % dim] = NAN
            shows = torch.randint(0, 3, (len(ids),), generator=generator).tolist()
            clicks = torch.randint(0, 2, (len(ids),), generator=generator).float().tolist()
            assert table.push(ids, gradients, shows, clicks) == plain.push(ids, gradients, shows, clicks)
        elif what == "pull":
            torch.testing.assert_close(table.pull(ids), plain.pull(ids), atol=1e-6, rtol=1e-6)
        elif what == "end_day":
            table.native.end_day(0.5)
            plain.end_day(0.5)
        else:
            assert table.native.shrink(0.6, number, 2.0) == plain.shrink(0.6, number, 2.0)
        assert table.native.rows == len(plain.values)
        assert table.native.waiting == len(plain.waiting)
    rows = table.scan(room=7)
    assert rows.keys() == plain.values.keys()
    for id, (value, state, counters) in rows.items():
        torch.testing.assert_close(value, plain.values[id], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(state, plain.sums[id], atol=1e-6, rtol=1e-5)
        assert counters == tuple(plain.counters[id])


RULES: list[tuple[RowRule, Callable[[list[Tensor]], torch.optim.Optimizer]]] = [
    (SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    (Momentum(0.1), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    (Momentum(0.1, 0.8, nesterov=True), lambda p: torch.optim.SGD(p, 0.1, momentum=0.8, nesterov=True)),
    (Adagrad(0.05), lambda p: torch.optim.Adagrad(p, 0.05)),
    (
        Adagrad(0.05, eps=1e-6, initial_accumulator=0.1),
        lambda p: torch.optim.Adagrad(p, 0.05, eps=1e-6, initial_accumulator_value=0.1),
    ),
    (RMSProp(0.01), lambda p: torch.optim.RMSprop(p, 0.01)),
    (Adam(0.01), lambda p: torch.optim.Adam(p, 0.01)),
    (Adam(0.01, betas=(0.5, 0.9), eps=1e-6), lambda p: torch.optim.Adam(p, 0.01, betas=(0.5, 0.9), eps=1e-6)),
    (AdamW(0.01, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
]


@pytest.mark.parametrize(
    ("rule", "torch_optimizer"), RULES, ids=lambda value: None if callable(value) else repr(value)[:40]
)
@pytest.mark.parametrize("dim", [5, 16])
def test_rules_are_those_of_torch(
    rule: RowRule, torch_optimizer: Callable[[list[Tensor]], torch.optim.Optimizer], dim: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = random_ids(300)
    for isa in ISAS:
        table = Rows(table_config(dim, rule, "uniform:0.1"), isa)
        parameter = torch.nn.Parameter(table.pull(ids))
        flat = _native.DenseRange(table_config(1, rule), parameter.numel(), isa)
        flat.set(parameter.data_ptr())
        optimizer = torch_optimizer([parameter])
        for _ in range(20):
            gradients = torch.randn(ids.numel(), dim, generator=generator)
            order = torch.randperm(ids.numel(), generator=generator)
            table.push(ids[order], gradients[order] * 4, scale=0.25)
            assert flat.push(gradients.data_ptr())
            parameter.grad = gradients
            optimizer.step()
        dense = torch.empty_like(parameter.data)
        flat.pull(dense.data_ptr())
        torch.testing.assert_close(table.pull(ids), parameter.data, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(dense, parameter.data, atol=1e-6, rtol=1e-6)


def test_adagrad_by_rows_keeps_the_mean_square() -> None:
    table = Rows(table_config(11, Adagrad(0.1, rowwise=True, initial_accumulator=0.5)))
    first, second = torch.randn(2, 1, 11, generator=torch.Generator().manual_seed(1))
    table.push([7], first)
    table.push([7], second)
    half = 0.5 + (first**2).mean()
    full = half + (second**2).mean()
    wanted = -0.1 * first / (half.sqrt() + 1e-10) - 0.1 * second / (full.sqrt() + 1e-10)
    torch.testing.assert_close(table.pull([7]), wanted)
    assert table.native.state_floats == 1


@pytest.mark.parametrize("power", [-0.5, -0.3])
def test_ftrl_is_that_of_the_paper(power: float) -> None:
    alpha, beta, l1, l2 = 0.1, 1.0, 0.3, 0.2
    config = _native.table_config(6, "ftrl", lr=alpha, beta1=beta, l1=l1, l2=l2, lr_power=power)
    generator = torch.Generator().manual_seed(1)
    gradients = torch.randn(30, 6, generator=generator, dtype=torch.float64)
    gradients[:, 0] *= 0.01
    w, z, n = torch.zeros(3, 6, dtype=torch.float64)
    for g in gradients:
        sigma = ((n + g**2) ** -power - n**-power) / alpha
        z, n = z + g - sigma * w, n + g**2
        w = torch.where(z.abs() <= l1, 0.0, -(z - z.sign() * l1) / ((beta + n**-power) / alpha + l2))
    for isa in ISAS:
        table = Rows(config, isa)
        for g in gradients:
            table.push([5], g[None])
        torch.testing.assert_close(table.pull([5])[0], w.float(), atol=1e-5, rtol=1e-5)
        assert table.pull([5])[0, 0] == 0, "a small gradient leaves a weight that is exactly zero"
    assert table_config(6, FTRL(alpha, l1=l1, l2=l2)) == _native.table_config(
        6, "ftrl", lr=alpha, beta1=1.0, l1=l1, l2=l2
    )


def test_ftrl_rests_where_a_schedule_has_come_to_nothing() -> None:
    table = Rows(table_config(4, FTRL(0.1, l1=0.01)))
    table.push([5], torch.ones(1, 4))
    before = table.scan()[5]
    table.push([5], torch.ones(1, 4), lr_factor=0.0)
    for part, was in zip(table.scan()[5][:2], before[:2], strict=True):
        torch.testing.assert_close(part, was, rtol=0, atol=0)


def test_all_instruction_sets_give_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(1)
    ids, gradients = random_ids(100), torch.randn(3, 100, 19, generator=generator)
    for rule in (Adagrad(0.1, rowwise=True), Adam(0.1), FTRL(0.1, l1=0.1), RMSProp(0.1)):
        for initial in ("uniform:0.5", "normal:0.5"):
            tables = [Rows(table_config(19, rule, initial), isa) for isa in ISAS]
            for table in tables:
                for gradient in gradients:
                    table.push(ids, gradient)
            for table in tables[1:]:
                assert torch.equal(table.pull(ids), tables[0].pull(ids))


def test_a_schedule_and_a_delay() -> None:
    table = Rows(table_config(4, SGD(0.5), "constant:1"))
    table.push([3], torch.full((1, 4), 2.0), lr_factor=0.25)
    assert table.pull([3]).tolist() == [[0.75] * 4]
    pulled, gradient = torch.full((1, 4), 0.5), torch.full((1, 4), 2.0)
    table.push([3], gradient, pulled=pulled, compensation=0.1, scale=0.5)
    torch.testing.assert_close(table.pull([3]), 0.75 - 0.5 * (1 + 0.1 * 1 * 1 * (0.75 - 0.5)) * torch.ones(1, 4))
    flat = _native.DenseRange(table_config(1, SGD(0.5)), 4)
    start = torch.full((4,), 0.75)
    flat.set(start.data_ptr())
    flat.push(gradient.data_ptr(), pulled.data_ptr(), 0.1, 0.5)
    out = torch.empty(1, 4)
    flat.pull(out.data_ptr())
    torch.testing.assert_close(out, table.pull([3]))


@pytest.mark.parametrize(("initial", "mean", "deviation"), [("uniform:0.3", 0, 0.3 / 3**0.5), ("normal:0.3", 0, 0.3)])
def test_initial_values_follow_seed_id_and_column(initial: str, mean: float, deviation: float) -> None:
    ids = random_ids(4000)
    table = Rows(table_config(16, SGD(0.1), initial, seed=3))
    values = table.pull(ids)
    assert table.native.rows == 0, "a pull makes no row"
    assert abs(values.mean() - mean) < 0.005
    assert abs(values.std() - deviation) < 0.005
    assert torch.corrcoef(values.T).fill_diagonal_(0).abs().max() < 0.08
    assert torch.corrcoef(torch.stack([values[1:, 0], values[:-1, 0]]))[0, 1].abs() < 0.08
    assert torch.equal(Rows(table_config(16, SGD(0.1), initial, seed=3)).pull(ids.flip(0)), values.flip(0))
    assert not torch.equal(Rows(table_config(16, SGD(0.1), initial, seed=4)).pull(ids), values)
    assert torch.equal(Rows(table_config(5, SGD(0.1), initial, seed=3)).pull(ids), values[:, :5])
    table.push(ids, torch.zeros(ids.numel(), 16))
    assert torch.equal(table.pull(ids), values), "and a row begins with them"


def test_growth_keeps_every_row_and_little_memory() -> None:
    table = Rows(table_config(8, SGD(1.0)))
    ids = random_ids(600_000)
    seen, worst = 0, 0.0
    for part in ids.split(20_000):
        gradients = part.remainder(1000).float()[:, None].expand(-1, 8)
        assert table.push(part, gradients)["admitted"] == part.numel()
        seen += part.numel()
        if seen > 200_000:
            worst = max(worst, table.native.bytes / table.native.payload_bytes)
    assert table.native.rows == ids.numel()
    assert worst <= 1.3
    assert torch.equal(table.pull(ids)[:, 3], -ids.remainder(1000).float())
    assert not table.pull(random_ids(1000, seed=9)).any()


def test_rows_that_shrink_frees_are_used_again() -> None:
    table = Rows(table_config(4, Adagrad(0.1), "constant:0.5"))
    ids = random_ids(50_000)
    table.push(ids, torch.ones(ids.numel(), 4))
    before = table.native.bytes
    for turn in range(4):
        kept = ids[turn::4]
        table.native.end_day(1.0)
        table.push(kept, torch.ones(kept.numel(), 4))
        assert table.native.shrink(0, unseen_days=1) == ids.numel() - kept.numel()
        assert table.native.rows == kept.numel()
        gone = torch.ones(ids.numel(), dtype=torch.bool)
        gone[turn::4] = False
        assert (table.pull(ids[gone]) == 0.5).all(), "what is removed has its initial value again"
        assert (table.pull(kept) < 0.5).all()
        table.push(ids[gone], torch.ones(int(gone.sum()), 4))
        torch.testing.assert_close(table.pull(ids[gone]), torch.full((int(gone.sum()), 4), 0.4))
    assert table.native.bytes <= before * 1.02
    assert table.scan().keys() == set(ids.tolist())


def test_admission_by_probability_is_a_function_of_seed_id_and_sequence() -> None:
    config, ids = table_config(2, SGD(1.0), entry="probability:0.25", seed=5), random_ids(20_000)
    table, again = Rows(config), Rows(config)
    done = table.push(ids, torch.ones(ids.numel(), 2), sequence=1)
    assert done["admitted"] == done["updated"] == ids.numel() - done["waiting"]
    assert abs(done["admitted"] / ids.numel() - 0.25) < 0.02
    again.push(ids.flip(0), torch.ones(ids.numel(), 2), sequence=1)
    assert torch.equal(again.pull(ids), table.pull(ids))
    done = table.push(ids, torch.ones(ids.numel(), 2), sequence=2)
    assert abs(done["admitted"] / done["waiting"] - 1 / 3) < 0.03, "each push draws anew"


@pytest.mark.parametrize("broken", [NAN, INF, -INF, 3e38])
def test_what_is_not_finite_changes_nothing(broken: float) -> None:
    table = Rows(table_config(4, Momentum(0.1)))
    table.push([1, 2], torch.ones(2, 4))
    before = table.scan()
    gradients = torch.ones(3, 4)
    gradients[0, 3] = gradients[2, 0] = broken
    done = table.push([1, 2, 3], gradients, scale=2.0)
    assert done == {"updated": 1, "admitted": 0, "waiting": 0, "not_finite": 2}
    assert torch.equal(table.pull([1]), before[1][0][None])
    assert table.scan()[1][2] == before[1][2]
    assert table.native.rows == 2
    flat = _native.DenseRange(table_config(1, Momentum(0.1)), 4)
    assert not flat.push(gradients.data_ptr(), scale=2.0)
    out = torch.ones(4)
    flat.pull(out.data_ptr())
    assert not out.any()


def test_set_makes_rows_and_leaves_the_state_of_those_that_are_there() -> None:
    table = Rows(table_config(4, Adagrad(0.1, initial_accumulator=0.5), entry="count:9"))
    table.set([3, 4], torch.ones(2, 4))
    table.push([3], torch.ones(1, 4))
    table.set([3], torch.full((1, 4), 7.0))
    rows = table.scan()
    assert rows[3][0].tolist() == [7.0] * 4
    assert rows[3][1].tolist() == [1.5] * 4
    assert table.pull([4, 3, 4])[:, 0].tolist() == [1, 7, 1]


def test_set_leaves_the_number_of_steps_that_adam_has_made() -> None:
    config = table_config(4, Adam(0.1))
    plain, often_set = Rows(config), Rows(config)
    for step in range(5):
        for table in (plain, often_set):
            table.push([3], torch.full((1, 4), float(step - 1)))
        often_set.set([3], often_set.pull([3]))
    torch.testing.assert_close(often_set.pull([3]), plain.pull([3]), rtol=0, atol=0)


def test_many_threads_push_and_pull() -> None:
    table = Rows(table_config(8, None))
    ids = random_ids(20_000)
    problems: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(10):
            order = torch.randperm(ids.numel(), generator=generator)
            table.push(ids[order], torch.ones(ids.numel(), 8))
            values = table.pull(ids)
            if not (values == values[:, :1]).all():
                problems.append("a row was read while it was written")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems
    assert (table.pull(ids) == 40).all()
    assert table.native.rows == ids.numel()
    assert all(counters == (40, 0) for _, _, counters in table.scan().values())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rule": "adamax"}, "unknown rule 'adamax'"),
        ({"dim": 0}, "dim is 0"),
        ({"lr": NAN}, "lr is"),
        ({"beta2": 1.0}, "beta2 is 1"),
        ({"admission": "count", "count": 2**24}, "admission count"),
        ({"admission": "probability"}, "admission probability"),
        ({"initializer": "uniform", "low_or_mean": 1.0}, "low_or_mean is 1"),
    ],
)
def test_a_wrong_configuration_is_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.table_config(**({"dim": 4, "rule": "sgd"} | changed))


def test_a_wrong_configuration_from_a_wire_is_refused() -> None:
    good = bytearray(table_config(4, SGD(0.1)))
    with pytest.raises(ValueError, match="96 bytes, not 95"):
        _native.Table(bytes(good[:-1]))
    for at in range(len(good)):
        for value in (1, 77, 255):
            bad = bytes(good[:at] + bytes([value]) + good[at + 1 :])
            try:
                table = Rows(bad)
            except ValueError:
                continue
            if table.native.dim == 4:
                table.push([1], torch.ones(1, 4))
    with pytest.raises(ValueError, match="no rows"):
        _native.DenseRange(table_config(4, Adagrad(0.1, rowwise=True)), 4)
