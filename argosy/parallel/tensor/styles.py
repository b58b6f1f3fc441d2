"""A style: how one module is divided, and which parameters of it lie where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard, TypeVar

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from argosy.config import ConfigError

Kind = TypeVar("Kind", bound=nn.Module)
_KINDS: dict[str, type[nn.Module]] = {
    "column": nn.Linear,
    "row": nn.Linear,
    "vocab": nn.Embedding,
    "heads": nn.MultiheadAttention,
}


def computes_as(module: nn.Module, kind: type[Kind]) -> TypeGuard[Kind]:
    """Whether a module is of a kind of torch's and computes as that does, from parameters of its own.

    What is divided computes in our way, so a subclass with a `forward` of its own, or a weight that is computed from
    others (weight_norm, say), stays whole.

    >>> normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    >>> [computes_as(each, nn.Linear) for each in (nn.Linear(2, 2), normed)]
    [True, False]
    """
    if not isinstance(module, kind) or type(module).forward is not kind.forward or "forward" in vars(module):
        return False
    if isinstance(module, nn.MultiheadAttention):
        return "in_proj_weight" in module._parameters and computes_as(module.out_proj, nn.Linear)
    return "weight" in module._parameters


@dataclass(frozen=True)
class Style:
    """How a module is divided: `kind` is column, row, vocab, heads or replicate; `parts` of a column's are fused ones.

    >>> str(Style.parse("column3")), Style.parse("column3").parts
    ('column3', 3)
    """

    kind: str
    parts: int = 1

    @classmethod
    def parse(cls, text: str) -> Style:
        """A style from its spelling, which has been checked."""
        return cls("column", int(text[6:] or 1)) if text.startswith("column") else cls(text)

    def __str__(self) -> str:
        return self.kind if self.parts == 1 else f"{self.kind}{self.parts}"

    def fits(self, module: nn.Module) -> bool:
        """Whether a module is of the kind that the style divides, with torch's own forward."""
        return self.kind == "replicate" or computes_as(module, _KINDS[self.kind])

    @property
    def takes(self) -> str:
        """What kind of module the style divides."""
        return f"nn.{_KINDS[self.kind].__name__}"

    def placement(self, parameter: str) -> Placement:
        """Where a module's parameter lies; see [Note: fused parameters] in `place.py`."""
        if self.kind == "column" and self.parts == 1:
            return Shard(0)
        if self.kind == "column":
            return _StridedShard(0, split_factor=self.parts) if parameter == "weight" else Replicate()
        if self.kind == "heads":
            if parameter == "in_proj_weight":
                return _StridedShard(0, split_factor=3)
            return Shard(1) if parameter == "out_proj.weight" else Replicate()
        if self.kind == "row":
            return Shard(1) if parameter == "weight" else Replicate()
        return Shard(0) if self.kind == "vocab" else Replicate()

    def check(self, name: str, module: nn.Module, size: int) -> None:
        """Refuse to divide what does not divide."""
        for what, number, unit in _sizes(self, module):
            if number % (size * unit):
                raise ConfigError("tensor", size, _mend(name, self, what, number, size, unit))

    def describe(self, module: nn.Module) -> str:
        """What it is that is divided, in words."""
        if isinstance(module, nn.Linear):
            return f"{module.in_features} -> {module.out_features}"
        if isinstance(module, nn.Embedding):
            return f"{module.num_embeddings} rows of {module.embedding_dim}"
        if isinstance(module, nn.MultiheadAttention):
            return f"{module.num_heads} heads of {module.head_dim}"
        return type(module).__name__


def _sizes(style: Style, module: nn.Module) -> list[tuple[str, int, int]]:
    if style.kind == "column":
        assert isinstance(module, nn.Linear)
        return [("out_features", module.out_features, style.parts)]
    if style.kind == "row":
        assert isinstance(module, nn.Linear)
        return [("in_features", module.in_features, 1)]
    if style.kind == "vocab":
        assert isinstance(module, nn.Embedding)
        return [("num_embeddings", module.num_embeddings, 1)]
    if style.kind == "heads":
        assert isinstance(module, nn.MultiheadAttention)
        return [("num_heads", module.num_heads, 1)]
    return []


def _mend(name: str, style: Style, what: str, number: int, size: int, unit: int) -> str:
    step = size * unit
    parts = f" in {unit} parts" if unit > 1 else ""
    return (
        f"{name} has {what}={number}, which does not divide{parts} among {size} ranks; pad it to "
        f"{-(-number // step) * step}, choose another tensor=, or say tensor_plan={name}:replicate"
        if style.kind != "heads"
        else f"{name} has {number} heads, which do not divide among {size} ranks; choose another tensor=, or say "
        f"tensor_plan={name}:replicate"
    )
