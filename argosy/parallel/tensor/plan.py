"""The plan: a style for each module of a model that has parameters, inferred, overridden, checked, and told."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from argosy.config import ConfigError
from argosy.parallel.tensor.config import TensorConfig
from argosy.parallel.tensor.recognise import REPLICATE, Found, recognise
from argosy.parallel.tensor.styles import Style


@dataclass(frozen=True)
class Plan:
    """How each module of a model is divided among `size` ranks; `styles` is by name, in the model's order."""

    model: nn.Module
    size: int
    styles: dict[str, Style]

    def lines(self) -> list[str]:
        """The plan for the user: a line for each kind of module, not for each of a hundred layers."""
        said_of: dict[str, tuple[str, str]] = {}
        for name, style in self.styles.items():
            told = "" if style == REPLICATE else style.describe(self.model.get_submodule(name))
            said_of[name] = str(style), told
        alike: dict[str, set[tuple[str, str]]] = {}
        for name, style_and_told in said_of.items():
            alike.setdefault(_general(name), set()).add(style_and_told)
        kinds: dict[tuple[str, str, str], list[str]] = {}
        for name, style_and_told in said_of.items():
            general = _general(name) if len(alike[_general(name)]) == 1 else _general_but_last(name)
            kinds.setdefault((general, *style_and_told), []).append(name or "the model")
        rows, whole = [], []
        for (general, style_name, told), names in kinds.items():
            said = general if len(names) > 1 else names[0]
            if told:
                rows.append((said, style_name, told, f"x {len(names)}" if len(names) > 1 else ""))
            else:
                whole.append(said)
        widths = [max((len(row[cell]) for row in rows), default=0) for cell in range(4)]
        lines = [f"tensor plan for {self.size} ranks"]
        for row in rows:
            cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append(f"  {cells}".rstrip())
        return [*lines, f"  whole on every rank: {', '.join(whole)}"] if whole else lines


def _general(name: str) -> str:
    """A module's name without the numbers of layers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _general_but_last(name: str) -> str:
    """The same, where the last number tells modules of one layer apart.

    >>> _general_but_last("blocks.3.mlp.0")
    'blocks.*.mlp.0'
    """
    return re.sub(r"(?<![^.])\d+(?=\.)", "*", name)


def make_plan(model: nn.Module, size: int, config: TensorConfig) -> Plan:
    """The plan of a model for so many ranks: what is inferred, with what the user says instead."""
    found = recognise(model, size)
    given = _given(model, config)
    styles = {name: given.get(name) or found.styles.get(name, REPLICATE) for name, _ in units(model)}
    _tie(model, styles, given)
    for name, style in styles.items():
        style.check(name, model.get_submodule(name), size)
    _check_heads(styles, found, size)
    if all(style == REPLICATE for style in styles.values()) and not given:
        fix = (
            f"nothing in this {type(model).__name__} is recognised, so all ranks would compute the same; name what is "
            f"to be divided, as in tensor_plan=*.fc1:column,*.fc2:row, or leave tensor= out"
        )
        raise ConfigError("tensor_plan", config.tensor_plan, fix)
    return Plan(model, size, styles)


def units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a plan speaks of: those with parameters of their own. An attention module counts as one."""
    attention: set[str] = set()
    for name, module in model.named_modules():
        if name.rpartition(".")[0] in attention:
            continue
        if isinstance(module, nn.MultiheadAttention):
            attention.add(name)
            yield name, module
        elif any(True for _ in module.parameters(recurse=False)):
            yield name, module


def _given(model: nn.Module, config: TensorConfig) -> dict[str, Style]:
    """What the user says, by module."""
    given: dict[str, Style] = {}
    modules = dict(units(model))
    for pattern, text in config.entries():
        style = Style.parse(text)
        inside = f"{pattern}.*" if style == REPLICATE else pattern
        fitting = [name for name in modules if fnmatchcase(name, pattern) or fnmatchcase(name, inside)]
        if not fitting:
            whole = next((name for name, _ in model.named_modules() if name and fnmatchcase(name, pattern)), None)
            if inner := [name for name in modules if whole and name.startswith(f"{whole}.")]:
                said = f"{pattern!r} has no parameters of its own; say it of what is in it, as {_general(inner[0])}"
                raise ConfigError("tensor_plan", config.tensor_plan, said)
            known = ", ".join(dict.fromkeys(_general_but_last(name) for name in modules))
            raise ConfigError("tensor_plan", config.tensor_plan, f"{pattern!r} fits no module; there are {known}")
        for name in fitting:
            if name in given:
                continue
            if not style.fits(modules[name]):
                kind = type(modules[name]).__name__
                fix = f"{name} is a {kind}, and {style} is for {style.takes}; narrow the pattern {pattern!r}"
                raise ConfigError("tensor_plan", config.tensor_plan, fix)
            given[name] = style
    return given


def _tie(model: nn.Module, styles: dict[str, Style], given: dict[str, Style]) -> None:
    """Give modules that share a parameter styles that divide it alike: what is inferred follows what the user says."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for name in styles:
        for path, parameter in _parameters(model.get_submodule(name)):
            owners.setdefault(id(parameter), []).append((name, path))
    for shared in owners.values():
        placements = {styles[name].placement(path) for name, path in shared}
        if len(placements) == 1:
            continue
        said = [styles[name] for name, _ in shared if name in given] or [REPLICATE]
        for name, _ in shared:
            if name not in given and REPLICATE in said:
                styles[name] = REPLICATE
        if len({styles[name].placement(path) for name, path in shared}) > 1:
            names = ", ".join(f"{name} ({styles[name]})" for name, _ in shared)
            fix = f"{names} share a parameter, which these divide differently; give all of them a style"
            raise ConfigError("tensor_plan", ",".join(f"{name}:{style}" for name, style in given.items()), fix)


def _parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=isinstance(module, nn.MultiheadAttention))


def _check_heads(styles: dict[str, Style], found: Found, size: int) -> None:
    for name, heads in found.heads.items():
        if styles.get(name, REPLICATE).kind == "column" and heads % size:
            fix = (
                f"{name} has {heads} heads, which do not divide among {size} ranks; choose another tensor=, or say "
                f"tensor_plan={name.rpartition('.')[0] or name}:replicate"
            )
            raise ConfigError("tensor", size, fix)
