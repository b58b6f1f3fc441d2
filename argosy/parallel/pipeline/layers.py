"""The layers of a model: the modules at which it may be cut.

A model is a tree of modules. Lists and sequences of modules are opened, and so is a module that holds most of the model
in such a list (a decoder in a language model); everything below stays whole. No layer lies inside another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from argosy.config import ConfigError

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_layers(model: nn.Module, named: Sequence[str] = ()) -> dict[str, nn.Module]:
    """The layers by their names. Modules that the user has named are layers, whatever they are inside of.

    >>> list(find_layers(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))))
    ['0', '1.0', '1.1']
    """
    known = dict(model.named_modules())
    for name in named:
        if not name or name not in known:
            fix = f"the model has no module {name!r}; it has {', '.join(list(find_layers(model))[:6])}, ..."
            raise ConfigError("split", ",".join(named), fix)
    half = sum(parameter.numel() for parameter in model.parameters()) / 2
    layers: dict[str, nn.Module] = {}
    for name, module in _open(model, "", half, tuple(named)):
        if all(module is not other for other in layers.values()):
            layers[name] = module
    for name in named:
        if name not in layers:
            raise ConfigError(
                "split", ",".join(named), f"{name} is inside of another named module; name one of the two"
            )
    return layers


def _open(module: nn.Module, prefix: str, half: float, named: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    for key, child in module.named_children():
        name = f"{prefix}{key}"
        inside = any(each.startswith(f"{name}.") for each in named)
        if inside or (name not in named and _opens(child, half)):
            yield from _open(child, f"{name}.", half, named)
        else:
            yield name, child


def _opens(module: nn.Module, half: float) -> bool:
    if isinstance(module, _LISTS):
        return len(module) > 0
    return any(
        isinstance(inner, _LISTS) and len(inner) > 1 and sum(p.numel() for p in inner.parameters()) > half
        for inner in module.modules()
    )
