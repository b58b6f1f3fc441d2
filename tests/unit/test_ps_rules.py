"""What a user writes about a table: rules, schedules, initial values, admission."""

from __future__ import annotations

import math

import numpy as np
import pytest

from argosy.config import ConfigError
from argosy.ps import FTRL, SGD, Adagrad, Adam, AdamW, Entry, Initial, Momentum, RMSProp, factor, table_config


def test_schedules() -> None:
    assert [factor("", step) for step in (0, 10**9)] == [1, 1]
    assert [factor("warmup:2", step) for step in range(4)] == [0.5, 1, 1, 1]
    assert [factor("step:2:0.5", step) for step in range(5)] == [1, 1, 0.5, 0.5, 0.25]
    assert factor("exponential:10:0.25", 5) == pytest.approx(0.5)
    assert [factor("linear:4", step) for step in (0, 1, 4, 9)] == [1, 0.75, 0, 0]
    assert factor("cosine:100", 0) == 1
    assert factor("cosine:100", 25) == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert factor("cosine:100", 100) == factor("cosine:100", 1000) == 0


@pytest.mark.parametrize(
    "schedule",
    ["warmup", "warmup:", "warmup:0", "warmup:-1", "step:10", "step:10:0", "sine:3", "linear:2.5", "step:1:x"],
)
def test_what_is_no_schedule(schedule: str) -> None:
    with pytest.raises(ConfigError, match="schedule"):
        SGD(0.1, schedule=schedule)


def test_numpys_numbers_are_numbers() -> None:
    assert SGD(np.float32(0.5)) == SGD(0.5)
    assert hash(Adam(0.1, betas=[np.float64(0.5), 0.75])) == hash(Adam(0.1, betas=(0.5, 0.75)))  # type: ignore[arg-type]


def test_rules_are_frozen_and_know_their_schedule() -> None:
    rule = Adam(0.001, schedule="warmup:10")
    assert rule.factor(0) == 0.1
    assert rule == Adam(0.001, schedule="warmup:10") != AdamW(0.001, schedule="warmup:10")
    with pytest.raises(AttributeError):
        rule.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: SGD(-0.1), "lr"),
        (lambda: SGD(math.nan), "lr"),
        (lambda: SGD("0.1"), "lr"),  # type: ignore[arg-type]
        (lambda: SGD(True), "lr"),
        (lambda: SGD(0.1, schedule=3), "schedule"),  # type: ignore[arg-type]
        (lambda: Adagrad(0.1, rowwise=1), "rowwise"),  # type: ignore[arg-type]
        (lambda: Adam(0.1, betas=0.9), "betas"),  # type: ignore[arg-type]
        (lambda: Adam(0.1, betas=("0.9", "0.99")), "betas"),  # type: ignore[arg-type]
        (lambda: Momentum(0.1, momentum=-1), "momentum"),
        (lambda: Adagrad(0.1, eps=-1), "eps"),
        (lambda: RMSProp(0.1, alpha=1.5), "alpha"),
        (lambda: Adam(0.1, betas=(0.9, 1.0)), "betas"),
        (lambda: Adam(0.1, betas=(-0.1, 0.9)), "betas"),
        (lambda: AdamW(0.1, weight_decay=math.inf), "weight_decay"),
        (lambda: FTRL(0.0), "lr"),
    ],
)
def test_wrong_numbers_are_named(make: object, field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}="):
        make()  # type: ignore[operator]


def test_initial_values_and_entries_from_text() -> None:
    assert Initial.parsed("zeros") == Initial("zeros", 0, 0)
    assert Initial.parsed("constant:-0.5") == Initial("constant", -0.5, 0)
    assert Initial.parsed("uniform:0.5") == Initial("uniform", -0.5, 0.5)
    assert Initial.parsed("normal:0.5") == Initial("normal", 0, 0.5)
    assert Entry.parsed("always") == Entry()
    assert Entry.parsed("count:5") == Entry("count", 5)
    assert Entry.parsed("probability:0.1") == Entry("probability", probability=0.1)


@pytest.mark.parametrize("text", ["", "zeros:1", "uniform", "uniform:-1", "normal:x", "constant:nan", "xavier:1"])
def test_what_is_no_initializer(text: str) -> None:
    with pytest.raises(ConfigError, match="initializer"):
        table_config(4, SGD(0.1), initializer=text)


@pytest.mark.parametrize("text", ["", "always:1", "count", "count:0", "count:1.5", "count:99999999", "probability:0",
                                  "probability:1.1", "probability:nan", "sometimes"])  # fmt: skip
def test_what_is_no_entry(text: str) -> None:
    with pytest.raises(ConfigError, match="entry"):
        table_config(4, SGD(0.1), entry=text)


def test_equal_configurations_have_equal_bytes() -> None:
    assert table_config(4, Adam(0.1), "uniform:0.1", "count:2", 3) == table_config(
        4, Adam(0.1), "uniform:0.1", "count:2", 3
    )
    assert table_config(4, Adam(0.1), seed=1) != table_config(4, Adam(0.1), seed=2)
    assert table_config(4, Adam(0.1), seed=-1) == table_config(4, Adam(0.1), seed=2**64 - 1)
    assert table_config(4, Adagrad(0.1)) != table_config(4, Adagrad(0.1, rowwise=True))
