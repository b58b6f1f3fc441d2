"""The strategy: three spellings of the same thing, and errors that say what to write instead."""

import dataclasses
import math
import typing
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy import config
from argosy.comm.config import MAX_SOCKETS, CommConfig
from argosy.config import Config, ConfigError
from argosy.data.batches import BatchConfig
from argosy.parallel.combinations import HybridConfig
from argosy.parallel.mesh_config import MeshConfig
from argosy.ps.config import PsConfig
from argosy.strategy import Strategy

HINTS = config.hints(Strategy)
PARTS: list[type[Config]] = [CommConfig, PsConfig, *HybridConfig.__bases__]
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(1, 2**63 - 1),
    float: st.floats(1e-3, 1e6),
    bool: st.booleans(),
    str: st.text(),
    config.COUNTS: st.lists(st.integers(1, 99), min_size=2).map(tuple),
    type(None): st.none(),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a field, by its type. A kind of field that is new here fails, and is to be added."""
    if typing.get_origin(hint) is Literal:
        return st.sampled_from(typing.get_args(hint))
    return VALUES[hint] if hint in VALUES else st.one_of([values(option) for option in typing.get_args(hint)])


BOUNDED = {
    "sockets": st.integers(1, MAX_SOCKETS),
    "accumulate": st.integers(1, 64),
    "bucket_mbytes": st.floats(0.01, 4096),
    "compress": st.sampled_from(["none", "bf16", "int4", "topk:0.01", "powersgd:2", "powersgd", "dgc", "dgc:0.99"]),
    "sync": st.sampled_from(["step", "local:8", "adaptive:16", "diloco:100:int4"]),
    "outer_lr": st.floats(0.1, 1),
    "outer_momentum": st.floats(0, 0.9),
    "dgc_warmup_epochs": st.integers(0, 9),
    "dgc_clip": st.floats(0.1, 10),
    "warmup": st.sampled_from(["none", "500", "5epochs"]),
    "average": st.sampled_from(["none", "ema:0.99"]),
    "ps": st.sampled_from(["none", "sync", "async:dc", "ssp:4", "geo:50"]),
    "dense": st.sampled_from(["server", "server", "allreduce"]),
    "ramp": st.sampled_from(["none", "4:3epochs"]),
    "shard_stage": st.sampled_from([None, 1, 2, 3]),
    "shard_modules": st.sampled_from(["auto", "blocks.*,head"]),
    "recompute": st.sampled_from(["none", "auto", "every:2"]),
    "tensor_plan": st.sampled_from(["auto", "*.fc1:column,*.fc2:row"]),
    "split": st.sampled_from(["auto", "blocks.2,blocks.4"]),
}


def made(chosen: dict[str, Any]) -> Strategy | None:
    """The strategy, or None if the choices do not go together."""
    kind = chosen.get("ps", "none")  # its options are many, and most go with one kind only: what does not is left out
    only = {"none": ("ps",), "sync": ("ps", "aggregate", "ps_values", "not_finite")}.get(kind)
    if only is not None:
        chosen = {name: value for name, value in chosen.items() if name in only or name not in config.hints(PsConfig)}
    try:
        return Strategy(**chosen)
    except ConfigError:
        return None


CHOICES = st.fixed_dictionaries({}, optional={name: values(hint) for name, hint in HINTS.items()} | BOUNDED)
STRATEGIES = CHOICES.map(made).filter(lambda strategy: strategy is not None)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(strategy=STRATEGIES)
def test_code_line_and_toml_say_the_same(strategy: Strategy) -> None:
    assert Strategy.parse(strategy.to_line()) == strategy
    assert Strategy.from_toml(strategy.to_toml()) == strategy
    assert Strategy.from_mapping(strategy.changed()) == strategy
    assert Strategy.load(strategy) is strategy


def test_only_what_differs_from_the_defaults_is_written() -> None:
    assert Strategy().to_line() == Strategy().to_toml() == ""
    assert Strategy(data=4, seed=0).to_line() == "data=4"
    assert Strategy(batch="global").to_toml() == 'batch = "global"\n'


def test_a_file_a_line_or_nothing_is_loaded(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('data = 4  # one for each core\nbatch = "global"\n', encoding="utf-8")
    expected = Strategy(data=4, batch="global")
    assert Strategy.load(plan) == Strategy.load(str(plan)) == Strategy.load("data=4 batch=global") == expected
    assert Strategy.load(None) == Strategy.load("") == Strategy()


@pytest.mark.parametrize("name", HINTS)
def test_no_field_takes_a_value_of_another_type(name: str) -> None:
    wrong: list[object] = [object(), [], {}, (), b"1", 1j, math.nan, math.inf]
    wrong += [] if bool in config.options(HINTS[name]) else [True, False]
    wrong += [] if type(None) in config.options(HINTS[name]) else [None]
    for value in wrong:
        with pytest.raises(ConfigError) as caught:
            Strategy(**{name: value})
        assert caught.value.field == name
        assert str(caught.value).startswith(f"{name}=")


@pytest.mark.parametrize(
    ("line", "field", "value", "fix"),
    [
        ("dta=4", "dta", "4", "did you mean 'data'?"),
        ("data=4 bach=global", "bach", "global", "did you mean 'batch'?"),
        ("zzz=1", "zzz", "1", "The fields are accumulate, aggregate, algorithm"),
        ("=4", "", "4", "no such field"),
        ("seed=1.5", "seed", "1.5", "a whole number"),
        ("seed=1e3", "seed", "1e3", "a whole number"),
        ("seed=true", "seed", "true", "a whole number"),
        ("seed=", "seed", "", "a whole number"),
        ("data=None", "data", "None", "a whole number"),
        ("timeout_seconds=soon", "timeout_seconds", "soon", "a number"),
        ("timeout_seconds=nan", "timeout_seconds", "nan", "a number"),
        ("timeout_seconds=1e999", "timeout_seconds", "inf", "a number"),
        ("batch=globl", "batch", "globl", "per-worker or global"),
        ("seed=-1", "seed", "-1", "between 0 and 2^63 - 1"),
        ("seed=9223372036854775808", "seed", "9223372036854775808", "between 0 and 2^63 - 1"),
        ("data=0", "data", "0", "leave it out to use all workers"),
        ("timeout_seconds=0", "timeout_seconds", "0", "say 300"),
        ("sockets=0", "sockets", "0", "expected 1 to 16"),
        ("sockets=17", "sockets", "17", "expected 1 to 16"),
        ("algorithm=rings", "algorithm", "rings", "auto or direct or ring or"),
        ("data=2 data=2", "data", "2", "already set to 2; say it once"),
        ("data", "strategy", "data", "expected field=value"),
        ("data = 4", "strategy", "data", "expected field=value"),
        ("data='4", "strategy", "data='4", "field=value"),
    ],
)
def test_a_wrong_line_is_refused(line: str, field: str, value: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Strategy.parse(line)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}={value}")
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("text", "field", "shown", "fix"),
    [
        ("dta = 4", "dta", "4", "did you mean 'data'?"),
        ("[mesh]\ndata = 4", "mesh", "{'data': 4}", "no such field"),
        ("[data]\nworkers = 4", "data", "{'workers': 4}", "a whole number"),
        ("data = 4.0", "data", "4.0", "a whole number"),
        ("data = true", "data", "true", "a whole number"),
        ('data = "4"', "data", "'4'", "a whole number"),
        ("seed = 2020-01-01", "seed", "2020-01-01", "a whole number"),
        ("timeout_seconds = nan", "timeout_seconds", "nan", "a number"),
        ("batch = 'globl'", "batch", "globl", "per-worker or global"),
        ("data = -1", "data", "-1", "at least 1"),
        ("data = 4\ndata = 4", "strategy", "TOML", "not valid TOML"),
        ("data = = 4", "strategy", "TOML", "line 1"),
    ],
)
def test_wrong_toml_is_refused(text: str, field: str, shown: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Strategy.from_toml(text)
    assert caught.value.field == field
    assert f"{field}=" in str(caught.value)
    assert shown in str(caught.value)
    assert fix in caught.value.fix


def test_a_wrong_field_in_code_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^dta=4: .*did you mean 'data'\?"):
        Strategy(dta=4)


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    missing, folder, binary, broken = (tmp_path / f"{name}.toml" for name in ("missing", "folder", "binary", "broken"))
    folder.mkdir()
    binary.write_bytes(b"\xff\xfe\x00")
    broken.write_text("data = 4\nseed = \n", encoding="utf-8")
    for path, reason in (missing, "No such file"), (folder, "directory"), (binary, "utf-8"), (broken, "line 2"):
        with pytest.raises(ConfigError, match=reason) as caught:
            Strategy.load(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("given_value", [4, {"data": 4}, ["data=4"], b"data=4"], ids=repr)
def test_what_is_no_strategy_is_refused(given_value: Any) -> None:
    with pytest.raises(ConfigError, match="strategy="):
        Strategy.load(given_value)


def test_a_deadline_beyond_all_clocks_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="timeout_seconds="):
        Strategy(timeout_seconds=1e300)


@settings(derandomize=True, deadline=None)
@given(data=st.none() | st.integers(1, 9), workers=st.integers(1, 9))
def test_a_mesh_must_fit_the_workers(data: int | None, workers: int) -> None:
    strategy = Strategy(data=data)
    if data in (None, workers):
        strategy.check_workers(workers)
        assert strategy.part(MeshConfig).sizes(workers).data == workers
    else:
        with pytest.raises(ConfigError, match=f"^data={data}: ") as caught:
            strategy.check_workers(workers)
        for words in (f"needs {data} workers", f"the job has {workers}", f"say data={workers}", f"start {data}"):
            assert words in caught.value.fix


def test_script_and_command_line_may_agree(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("data = 4", encoding="utf-8")
    four = Strategy(data=4)
    assert Strategy.agreed(None, None) == Strategy()
    assert Strategy.agreed(four, None) == Strategy.agreed(None, "data=4") == four
    for script in (four, "data=4", plan, str(plan)):
        assert Strategy.agreed(script, "data=4") == four


@pytest.mark.parametrize("script", [Strategy(data=2), "data=2", Strategy(data=2, seed=1)], ids=repr)
def test_script_and_command_line_may_not_contradict(script: Strategy | str) -> None:
    with pytest.raises(ConfigError, match="keep one of the two") as caught:
        Strategy.agreed(script, "data=4")
    assert caught.value.field == "strategy"
    assert "data=4" in str(caught.value)
    assert Strategy.load(script).to_line() in str(caught.value)


def test_a_strategy_does_not_change() -> None:
    strategy = Strategy()
    for name in HINTS:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(strategy, name, getattr(strategy, name))


@settings(derandomize=True, deadline=None)
@given(strategy=STRATEGIES)
def test_a_part_is_handed_its_own_fields_only(strategy: Strategy) -> None:
    for part in PARTS:
        handed = strategy.part(part)
        assert type(handed) is part
        assert vars(handed) == {field.name: getattr(strategy, field.name) for field in dataclasses.fields(part)}


def test_every_field_belongs_to_exactly_one_part() -> None:
    owned = [field.name for part in PARTS for field in dataclasses.fields(part)]
    assert sorted(owned) == sorted(HINTS)
    assert {CommConfig, BatchConfig, MeshConfig} <= set(PARTS)
