"""How often replicas meet: the spellings of `sync`, and the rule by which an adaptive period shrinks."""

from __future__ import annotations

import math

import pytest

from argosy.config import ConfigError
from argosy.parallel.local_config import LocalConfig, Rounds
from argosy.parallel.period import Period, adapted


@pytest.mark.parametrize(
    ("text", "rounds"),
    [
        ("step", Rounds("step")),
        ("local:8", Rounds("local", 8)),
        ("adaptive:16", Rounds("adaptive", 16)),
        ("diloco:100", Rounds("diloco", 100)),
        ("diloco:100:int4", Rounds("diloco", 100, bits=4)),
    ],
)
def test_sync_is_spelled(text: str, rounds: Rounds) -> None:
    assert LocalConfig(sync=text).rounds() == rounds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "steps",
        "step:2",
        "local",
        "local:",
        "local:0",
        "local:-1",
        "local:1.5",
        "local:8:int4",
        "diloco:8:int3",
        "a:b",
    ],
)
def test_what_is_no_way_to_synchronise_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"^sync={text}: expected step, local:8") as caught:
        LocalConfig(sync=text)
    assert "diloco:100:int4" in caught.value.fix


def test_outer_settings_are_checked_and_for_diloco_only() -> None:
    assert LocalConfig(sync="diloco:8", outer_lr=1.0, outer_momentum=0).outer_momentum == 0.0
    with pytest.raises(ConfigError, match=r"^outer_lr=0.0: "):
        LocalConfig(sync="diloco:8", outer_lr=0.0)
    with pytest.raises(ConfigError, match=r"^outer_momentum=1.0: "):
        LocalConfig(sync="diloco:8", outer_momentum=1.0)
    with pytest.raises(ConfigError, match=r"^sync=local:8: outer_lr and outer_momentum are for sync=diloco"):
        LocalConfig(sync="local:8", outer_lr=1.0)


def test_the_period_follows_the_root_of_the_loss() -> None:
    period = Period(20, adapts=True)
    seen = []
    for loss in (2.0, 1.0, 0.5, 4.0, math.nan, 0.02, 1e-9):
        period.learn(loss)
        seen.append(period.steps)
    assert seen == [20, math.ceil(20 * math.sqrt(0.5)), 10, 20, 20, 2, 1], "never beyond k, and NaN says nothing"
    again = Period(20, adapts=True)
    again.load_state_dict(period.state_dict())
    again.learn(0.5)
    assert again.steps == 10, "the first loss is the earlier run's"
    assert adapted(1, 0.5) == 1


def test_a_fixed_period_stays() -> None:
    period = Period(20, adapts=False)
    period.learn(None)
    period.learn(0.1)
    assert period.steps == 20


def test_an_adaptive_period_needs_a_positive_loss() -> None:
    with pytest.raises(RuntimeError, match=r"fleet.report\(loss\) before loss.backward\(\).*sync=local:20"):
        Period(20, adapts=True).learn(None)
    with pytest.raises(ValueError, match="sync=local:20 for a loss that may be negative"):
        Period(20, adapts=True).learn(-1.0)
