"""What every part's configuration shares: checked types, checked values, one kind of error.

A part of Argosy (batches, mesh, communication, ...) owns a frozen dataclass derived from `Config`. Its fields
are checked when it is made, wherever the values came from, so a wrong one is reported once, in one voice, and
before anything runs. `argosy.strategy` joins the parts into the one `Strategy` that users see.

Imports nothing of Argosy, so that every layer may use it.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from typing import Any, Final, Literal, TypeVar

C = TypeVar("C", bound="Config")
COUNTS: Final = tuple[int, ...]  # the type of a field that is a list of whole numbers


class ConfigError(ValueError):
    """A setting that cannot be used: which field, the value it had, and how to mend it."""

    def __init__(self, field: str, value: object, fix: str) -> None:
        self.field, self.value, self.fix = field, value, fix
        super().__init__(f"{field}={spell(value)}: {fix}")


@dataclasses.dataclass(frozen=True)
class Config:
    """A part's settings. Subclasses are frozen dataclasses; `check` may be defined by each to test values.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Oven(Config):
    ...     degrees: int = 180
    ...     def check(self) -> None:
    ...         if self.degrees > 300:
    ...             raise ConfigError("degrees", self.degrees, "an oven stays below 300")
    >>> Oven(degrees=450)
    Traceback (most recent call last):
    argosy.config.ConfigError: degrees=450: an oven stays below 300
    """

    def __new__(cls, /, *_: object, **values: object) -> Config:
        """Refuse unknown fields as they are refused in every other spelling."""
        for name, value in values.items():
            if name not in hints(cls):
                raise unknown(name, value, hints(cls))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name, hint in hints(type(self)).items():
            value = getattr(self, name)
            if not fits(value, hint):
                quoted = isinstance(value, str) and not takes_text(hint)
                raise ConfigError(
                    name, value, f"expected {describe(hint)}" + (f", not the text {value!r}" if quoted else "")
                )
            if isinstance(value, int) and not isinstance(value, bool) and float in options(hint):
                object.__setattr__(self, name, float(value))
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        # Every part's own check runs, whichever parts a class joins: parts need not know of each other.
        for part in type(self).__mro__:
            if "check" in vars(part) and part is not Config:
                part.check(self)  # type: ignore[attr-defined]

    def part(self, kind: type[C]) -> C:
        """Only the fields of one part, as that part's own class: what is handed down to its owner."""
        return kind(**{field.name: getattr(self, field.name) for field in dataclasses.fields(kind)})


def hints(kind: type[Config]) -> dict[str, Any]:
    """The field names of a configuration class, with their types."""
    resolved = _resolved(kind)  # type: ignore[arg-type]  # mypy takes a class's hash for that of its objects
    return {field.name: resolved[field.name] for field in dataclasses.fields(kind)}


@functools.cache  # it takes milliseconds, and every check asks
def _resolved(kind: type[Config]) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def options(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union type; a plain type is its only alternative."""
    # `int | None` is a types.UnionType, but `Literal[...] | None` a typing.Union.
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def takes_text(hint: Any) -> bool:
    """Whether a field's value may be text."""
    return any(option is str or typing.get_origin(option) is Literal for option in options(hint))


def fits(value: object, hint: Any) -> bool:
    """Whether a value is of a field's type. A bool is no number here, and a number is finite."""
    for option in options(hint):
        if typing.get_origin(option) is Literal:
            if value in typing.get_args(option):
                return True
        elif option is int:
            if isinstance(value, int) and not isinstance(value, bool):
                return True
        elif option is float:
            if isinstance(value, float) and math.isfinite(value):
                return True
            if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 53:
                return True
        elif option == COUNTS:
            if isinstance(value, (list, tuple)) and value and all(fits(each, int) for each in value):
                return True
        elif isinstance(value, option):
            return True
    return False


def describe(hint: Any) -> str:
    """A field's type in words."""
    words = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        COUNTS: "a list of whole numbers such as [3,1]",
    }
    said = []
    for option in options(hint):
        if typing.get_origin(option) is Literal:
            said.append(" or ".join(str(choice) for choice in typing.get_args(option)))
        elif option is not types.NoneType:
            said.append(words[option])
    return " or ".join(said)


def spell(value: object) -> str:
    """A value as it is written on a strategy line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(spell, value))}]"
    return str(value)


def parse(name: str, text: str, hint: Any) -> Any:
    """A value from its spelling on a strategy line, by the type of its field."""
    for option in options(hint):
        if typing.get_origin(option) is Literal and text in typing.get_args(option):
            return text
        if option is bool and text in ("true", "false"):
            return text == "true"
        if option in (int, float):
            try:
                return option(text)
            except ValueError:
                continue
        if option == COUNTS and re.fullmatch(r"\[\d+(,\s*\d+)*\]", text):
            return tuple(int(each) for each in text[1:-1].split(","))
        if option is str:
            return text
    raise ConfigError(name, text, f"expected {describe(hint)}")


@dataclasses.dataclass(frozen=True)
class Span:
    """A length of training, as users say it: `500` or `500steps`, `5epochs`."""

    count: int
    unit: Literal["steps", "epochs"]

    def __str__(self) -> str:
        return f"{self.count} {self.unit if self.count != 1 else self.unit[:-1]}"


def parse_span(text: str) -> Span | None:
    """A length of training from its spelling; None if it is none.

    >>> str(parse_span("5epochs")), str(parse_span("500")), parse_span("soon")
    ('5 epochs', '500 steps', None)
    """
    found = re.fullmatch(r"([1-9][0-9]{0,14})(steps?|epochs?)?", text)
    if found is None:
        return None
    return Span(int(found[1]), "epochs" if (found[2] or "").startswith("epoch") else "steps")


def unknown(name: str, value: object, known: typing.Iterable[str]) -> ConfigError:
    """The error for a field that does not exist, with the nearest one that does."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    guess = f"; did you mean {near[0]!r}?" if near else "."
    return ConfigError(name, value, f"there is no such field{guess} The fields are {', '.join(names)}")
