"""Configuration: checked types, checked values, and errors that name the field, the value and the fix."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy import config
from argosy.config import Config, ConfigError


@dataclass(frozen=True)
class Oven(Config):
    degrees: int = 180
    hours: float = 1.0
    fan: bool = False
    mode: Literal["bake", "grill"] = "bake"
    label: str = ""
    rack: int | None = None

    def check(self) -> None:
        if self.degrees > 300:
            raise ConfigError("degrees", self.degrees, "an oven stays below 300")


@dataclass(frozen=True)
class Fridge(Config):
    celsius: float = 5.0

    def check(self) -> None:
        if self.celsius > 10:
            raise ConfigError("celsius", self.celsius, "milk turns sour; say 10 or less")


@dataclass(frozen=True)
class Kitchen(Oven, Fridge):
    """Two parts in one, which know nothing of each other."""


EXPECTED = {
    "degrees": "a whole number",
    "hours": "a number",
    "fan": "true or false",
    "mode": "bake or grill",
    "label": "text",
    "rack": "a whole number",
}
OVENS = st.builds(
    Oven,
    degrees=st.integers(max_value=300),
    hours=st.floats(allow_nan=False, allow_infinity=False),
    fan=st.booleans(),
    mode=st.sampled_from(["bake", "grill"]),
    label=st.text(),
    rack=st.none() | st.integers(),
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("degrees", value) for value in (True, 180.0, math.nan, "180", None, [180])],
        *[("hours", value) for value in (True, math.nan, math.inf, -math.inf, "1", None, 1j)],
        *[("fan", value) for value in (0, 1, "true", None)],
        *[("mode", value) for value in ("boil", "BAKE", "", None, True, ["bake"])],
        *[("label", value) for value in (1, None, b"cake")],
        *[("rack", value) for value in (False, 2.0, "2", math.inf)],
    ],
)
def test_a_value_of_another_type_is_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Oven(**{field: value})
    assert (caught.value.field, caught.value.value) == (field, value)
    assert str(caught.value).startswith(f"{field}=")
    assert config.spell(value) in str(caught.value)
    assert EXPECTED[field] in str(caught.value)


def test_a_number_in_quotes_is_shown_in_quotes() -> None:
    with pytest.raises(ConfigError, match="'180'"):  # "degrees=180: expected a whole number" would baffle
        Oven(degrees="180")


def test_a_whole_number_in_a_float_field_becomes_a_float() -> None:
    assert type(Oven(hours=2).hours) is float
    assert Oven(hours=2) == Oven(hours=2.0)


def test_a_wrong_value_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"^degrees=450: an oven stays below 300$") as caught:
        Oven(degrees=450)
    assert (caught.value.field, caught.value.value, caught.value.fix) == ("degrees", 450, "an oven stays below 300")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("field", "value"), [("degrees", 301), ("celsius", 11.0)])
def test_every_part_of_a_joined_configuration_is_checked(field: str, value: float) -> None:
    assert Kitchen(degrees=300, celsius=10).celsius == 10
    with pytest.raises(ConfigError, match=f"^{field}={value}"):
        Kitchen(**{field: value})


def test_a_part_receives_its_own_fields_only() -> None:
    kitchen = Kitchen(degrees=220, rack=2, celsius=4)
    assert kitchen.part(Oven) == Oven(degrees=220, rack=2)
    assert vars(kitchen.part(Fridge)) == {"celsius": 4.0}


def test_a_configuration_does_not_change() -> None:
    oven = Oven()
    with pytest.raises(dataclasses.FrozenInstanceError):
        oven.degrees = 200
    assert hash(Oven(degrees=200)) == hash(dataclasses.replace(oven, degrees=200))


def test_a_changed_copy_is_checked_again() -> None:
    with pytest.raises(ConfigError, match="below 300"):
        dataclasses.replace(Oven(), degrees=301)


def test_a_choice_may_be_left_open() -> None:
    @dataclass(frozen=True)
    class Cake(Config):
        glaze: Literal["sugar", "egg"] | None = None

    assert Cake().glaze is None
    assert Cake(glaze="egg").glaze == "egg"
    with pytest.raises(ConfigError, match=r"^glaze=.*jam.*expected sugar or egg"):
        Cake(glaze="jam")


@settings(derandomize=True, deadline=None)
@given(oven=OVENS)
def test_every_value_is_read_back_from_its_spelling(oven: Oven) -> None:
    for name, hint in config.hints(Oven).items():
        value = getattr(oven, name)
        if value is not None:
            read = config.parse(name, config.spell(value), hint)
            assert (type(read), read) == (type(value), value)


@pytest.mark.parametrize(
    ("field", "text"),
    [("degrees", "hot"), ("degrees", "1.5"), ("degrees", ""), ("hours", "long"), ("fan", "True"), ("fan", "1")],
)
def test_text_that_spells_no_value_is_refused(field: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}={text}: expected {EXPECTED[field]}"):
        config.parse(field, text, config.hints(Oven)[field])


@pytest.mark.parametrize(("given_name", "nearest"), [("degree", "degrees"), ("hour", "hours"), ("lable", "label")])
def test_a_wrong_field_suggests_the_nearest(given_name: str, nearest: str) -> None:
    error = config.unknown(given_name, 3, config.hints(Oven))
    assert str(error).startswith(f"{given_name}=3: ")
    assert f"did you mean '{nearest}'?" in str(error)


def test_a_wrong_field_unlike_any_other_lists_them_all() -> None:
    message = str(config.unknown("xyz", 3, config.hints(Oven)))
    assert "did you mean" not in message
    fields: dict[str, Any] = config.hints(Oven)
    assert all(name in message for name in fields)
