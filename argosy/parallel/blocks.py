"""The blocks of a model: modules of one class that stand in a row, such as the layers of a transformer.

They are what a model is made of, so they are what is sharded, recomputed and told of as a whole.
"""

from __future__ import annotations

from collections import Counter

from torch import nn


def size_bytes(module: nn.Module) -> int:
    """What a module's parameters take."""
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks by name: members of a ModuleList or Sequential of which several have the same class.

    Of rows within rows the outer one counts, unless its members are a quarter of the model or more each.

    >>> net = nn.Sequential(nn.Embedding(9, 4), nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)]))
    >>> list(repeated_blocks(net))[:2]
    ['1.0', '1.1']
    """
    found: dict[str, nn.Module] = {}
    large = size_bytes(model) / 4

    def look(name: str, module: nn.Module) -> None:
        members = {f"{name}.{key}".strip("."): child for key, child in module.named_children()}
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            holding = {key: child for key, child in members.items() if size_bytes(child)}
            kinds = Counter(type(child) for child in holding.values())
            for key, child in holding.items():
                runs = not isinstance(child, (nn.ModuleList, nn.ModuleDict))  # as a whole
                if runs and kinds[type(child)] > 1 and not (size_bytes(child) >= large and repeated_blocks(child)):
                    found[key] = members.pop(key)
        for key, child in members.items():
            look(key, child)

    look("", model)
    return found


def span(names: list[str]) -> str:
    """Names of a row in short.

    >>> span(["blocks.0", "blocks.1", "blocks.2"]), span(["head"])
    ('blocks.0 to blocks.2', 'head')
    """
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
