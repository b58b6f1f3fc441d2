"""Which modules are sharded as a whole.

A sharded module's parameters are gathered when it runs and given back after it. Too large, and a worker holds much of
the model at once; too small, and each gathering is mostly waiting. So: the blocks that a model repeats, then what is
left and large (embeddings, heads); the rest stays with the root.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict

from torch import nn

from argosy.config import ConfigError
from argosy.parallel.blocks import repeated_blocks, size_bytes, span
from argosy.parallel.sharding.config import ShardConfig


def choose(model: nn.Module, config: ShardConfig) -> dict[str, nn.Module]:
    """The modules to shard, by name, the inner ones of nested modules first; the root, '', comes last.

    >>> net = nn.Sequential(nn.Embedding(1000, 8), *[nn.Linear(8, 8) for _ in range(3)])
    >>> list(choose(net, ShardConfig()))
    ['1', '2', '3', '0', '']
    """
    chosen = _named(model, config.patterns) if config.patterns else _by_size(model)
    shared = _shared(model)
    kept = {name: module for name, module in chosen.items() if not _has(module, shared, model)}
    depth = sorted(kept, key=lambda name: -name.count("."))
    return {name: kept[name] for name in depth} | {"": model}


def told(model: nn.Module, chosen: dict[str, nn.Module]) -> str:
    """The choice in one line for the user."""
    parts, rows = [], defaultdict(list)
    for name, module in chosen.items():
        if name:
            rows[type(module).__name__, size_bytes(module)].append(name)
    for (kind, size), names in rows.items():
        several = f"{len(names)} x " if len(names) > 1 else ""
        parts.append(f"{several}{kind} of {_mbytes(size)} ({span(names)})")
    inside = {id(parameter) for name, module in chosen.items() if name for parameter in module.parameters()}
    rest = sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in inside)
    return ", ".join([*parts, f"the rest of {_mbytes(rest)} together"])


def _named(model: nn.Module, patterns: list[str]) -> dict[str, nn.Module]:
    modules = {name: module for name, module in model.named_modules() if name}
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in modules):
            names = ", ".join(name for name in modules if name.count(".") < 2)
            raise ConfigError("shard_modules", pattern, f"no module is called so; {type(model).__name__} has {names}")
    wanted = {name: module for name, module in modules.items() if any(fnmatch.fnmatchcase(name, p) for p in patterns)}
    # A list of modules never runs as a whole, so nothing would gather it: its members are meant.
    lists = [name for name, module in wanted.items() if isinstance(module, (nn.ModuleList, nn.ModuleDict))]
    for name in lists:
        wanted |= {f"{name}.{key}": child for key, child in wanted.pop(name).named_children()}
    return {name: module for name, module in wanted.items() if size_bytes(module)}


def _by_size(model: nn.Module) -> dict[str, nn.Module]:
    blocks = repeated_blocks(model)
    within = {id(child) for block in blocks.values() for child in block.modules()}
    others = {
        name: size_bytes(module)
        for name, module in model.named_modules()
        if name and id(module) not in within and not list(module.children()) and size_bytes(module)
    }
    least = min(map(size_bytes, blocks.values()), default=size_bytes(model) // 16)
    modules = dict(model.named_modules())
    return blocks | {name: modules[name] for name, size in others.items() if size >= least}


def _shared(model: nn.Module) -> set[int]:
    """Parameters that several modules hold: tied weights."""
    holders = defaultdict(set)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)].add(id(module))
    return {parameter for parameter, modules in holders.items() if len(modules) > 1}


def _has(module: nn.Module, shared: set[int], model: nn.Module) -> bool:
    """Whether tied weights keep a module with the root: its weights are used outside of it, too."""
    tied = {id(parameter) for parameter in module.parameters()} & shared
    inside = {id(child) for child in module.modules()}
    outside = (other for other in model.modules() if id(other) not in inside)
    return any(id(parameter) in tied for other in outside for parameter in other.parameters(recurse=False))


def _mbytes(size: int) -> str:
    return f"{size / 1e6:.3g} MB"
