"""The strategy: every choice about how a job trains, in one frozen object with three spellings.

In code `Strategy(data=4, batch="global")`, on one line `"data=4 batch=global"`, in TOML `data = 4`. Each part of
Argosy owns its fields (`MeshConfig`, `BatchConfig`, `TrainingConfig`, `PsConfig`, `CommConfig`) and `Strategy` is their
union: it adds the spellings. Which choices go together is in `parallel/combinations.py` and `ps/combinations.py`. Parts
receive their own fields through `strategy.part(...)`, never the whole.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argosy import config
from argosy.comm.config import CommConfig
from argosy.config import ConfigError
from argosy.ps.combinations import ServedConfig

__all__ = ["ConfigError", "Strategy"]


@dataclass(frozen=True)
class Strategy(CommConfig, ServedConfig):
    """How a job trains. Fields left out keep their defaults.

    >>> Strategy(data=4, batch="global") == Strategy.parse("data=4 batch=global")
    True
    >>> print(Strategy(data=4, seed=7).to_line())
    data=4 seed=7
    >>> Strategy.parse("batch=globl")
    Traceback (most recent call last):
    argosy.config.ConfigError: batch=globl: expected per-worker or global
    """

    @classmethod
    def load(cls, given: Strategy | str | Path | None) -> Strategy:
        """A strategy from whatever the user gave: an object, a line, or the path of a TOML file."""
        if given is None:
            return cls()
        if isinstance(given, Strategy):
            return given
        if not isinstance(given, (str, Path)):
            fix = "expected a Strategy, a line such as 'data=4 batch=global', or the path of a .toml file"
            raise ConfigError("strategy", given, fix)
        if isinstance(given, Path) or given.endswith(".toml"):
            return cls.read(Path(given))
        return cls.parse(given)

    @classmethod
    def agreed(cls, script: Strategy | str | Path | None, command: str | None) -> Strategy:
        """The one strategy of a script and its command line, which may not contradict each other."""
        if script is None or command is None:
            return cls.load(script if command is None else command)
        ours, theirs = cls.load(script), cls.load(command)
        if ours != theirs:
            fix = f"the command line says this and the script says {ours.to_line()!r}; keep one of the two"
            raise ConfigError("strategy", command, fix)
        return ours

    @classmethod
    def parse(cls, line: str) -> Strategy:
        """A strategy from one line of `field=value` words."""
        hints = config.hints(cls)
        values: dict[str, Any] = {}
        try:
            words = shlex.split(line)
        except ValueError as error:
            raise ConfigError("strategy", line, f"{error}; write it as field=value field=value") from None
        for word in words:
            name, equals, text = word.partition("=")
            if not equals:
                raise ConfigError("strategy", word, "expected field=value, or the path of a .toml file")
            if name not in hints:
                raise config.unknown(name, text, hints)
            if name in values:
                raise ConfigError(name, text, f"it was already set to {config.spell(values[name])}; say it once")
            values[name] = config.parse(name, text, hints[name])
        return cls(**values)

    @classmethod
    def read(cls, path: Path) -> Strategy:
        """A strategy from a TOML file."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("strategy", path, f"the file cannot be read: {error}") from None
        return cls.from_toml(text, source=str(path))

    @classmethod
    def from_toml(cls, text: str, source: str = "TOML") -> Strategy:
        """A strategy from TOML text."""
        try:
            table = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError("strategy", source, f"not valid TOML: {error}") from None
        return cls.from_mapping(table)

    @classmethod
    def from_mapping(cls, table: Mapping[str, Any]) -> Strategy:
        """A strategy from field names and values; types are checked, never converted."""
        return cls(**table)

    def changed(self) -> dict[str, Any]:
        """The fields that differ from their defaults, in order."""
        defaults = type(self)()
        names = [field.name for field in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(defaults, name)}

    def to_line(self) -> str:
        """The strategy on one line; `Strategy.parse` gives it back."""
        return " ".join(f"{name}={shlex.quote(config.spell(value))}" for name, value in self.changed().items())

    def to_toml(self) -> str:
        """The strategy as TOML text; `Strategy.from_toml` gives it back."""
        # JSON spells numbers, booleans and strings as TOML does.
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in self.changed().items())
