"""What depends on what in a model's forward: where it can be cut, what crosses a cut, who uses which parameter.

The ghost of the model runs once while every torch function is watched. A tensor is *computed* if a parameter or a
random number is behind it. A model can be cut where a layer is called if every computed tensor that is made before that
call and used after it is among the call's arguments, and is used by layers that are given it and not by the code around
them (as `x` is in `x = x + layer(x)`): these are what the stage before sends. Tensors that are not computed (a mask,
positions) are made on each stage anew from the inputs, which all stages have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from argosy.config import ConfigError
from argosy.parallel.pipeline.ghost import Ghost

_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential", "gumbel")


@dataclass(frozen=True)
class Meta:
    """A tensor's shape and type, and whether a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass
class Call:
    """A layer was called. `travels` says which leaves of its arguments are computed; `why_not` why no cut is here."""

    name: str
    time: int
    travels: tuple[int, ...]
    metas: tuple[Meta, ...]
    given: frozenset[int] = frozenset()
    why_not: str = ""


@dataclass
class Trace:
    """One forward pass: the calls of layers in order, the times at which tensors of the model are used, the output."""

    calls: list[Call]
    uses: dict[str, list[int]]
    output: Any
    cuts: list[Call] = field(default_factory=list)

    def at(self, name: str) -> Call:
        """The call at which a stage begins."""
        return next(call for call in self.cuts if call.name == name)


def trace(ghost: Ghost, layers: Mapping[str, nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Trace:
    """Watch the ghost of a model run on inputs of these shapes."""
    watch = _Watch({id(tensor): name for name, tensor in ghost.named.items()})
    handles = []
    for name in layers:
        layer = ghost.module.get_submodule(name)
        hook = _hook(watch, name)  # before those of the layer: what these compute is the layer's own
        handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
        handles.append(layer.register_forward_hook(lambda *_: watch.returned()))
    try:
        with ghost.mode, torch.enable_grad(), watch:
            output = ghost.module(*ghost.shapes(args), **ghost.shapes(dict(kwargs)))
    except Exception as error:
        raise ConfigError(
            "pipeline",
            type(ghost.module).__name__,
            f"the model's forward could not be followed by shapes alone ({type(error).__name__}: {error}); "
            f"{_remedy(error)}",
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    watch.use(pytree.tree_leaves(output))
    return watch.result(output)


def _remedy(error: Exception) -> str:
    if "more than 1 value per channel" in str(error):
        return "batch normalisation needs several samples in each micro-batch: say micro_batches= with a smaller number"
    return "what it does may not depend on the numbers in a tensor (if x.sum() > 0, x.item()) before its last stage"


class _Watch(TorchFunctionMode):
    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self._names, self._time = names, 0
        self._calls: list[Call] = []
        self._uses: dict[str, list[int]] = {name: [] for name in names.values()}
        self._made: dict[int, int] = {}  # when a computed tensor was made
        self._used: dict[int, int] = {}  # when it was used last
        self._used_around: dict[int, int] = {}  # when it was used last by code around the layers
        self._given: frozenset[int] = frozenset()  # the computed arguments of the layer that runs
        self._alive: list[Any] = []  # an id is a tensor's for as long as the tensor lives

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        name = getattr(func, "__name__", "")
        changes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or "out" in kwargs
        if made or changes:
            self._time += 1
            inputs = pytree.tree_leaves((args, kwargs))
            if self.use(inputs) or any(word in name for word in _RANDOM):
                for tensor in [*made, *([leaf for leaf in inputs if isinstance(leaf, Tensor)][:1] if changes else [])]:
                    self._alive.append(tensor)
                    if id(tensor) not in self._names:
                        self._made.setdefault(id(tensor), self._time)
        return output

    def use(self, leaves: list[Any]) -> bool:
        """Note the use of tensors; whether one of them is a parameter, or computed."""
        computed = False
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                continue
            if id(leaf) in self._names:
                self._uses[self._names[id(leaf)]].append(self._time)
                computed = computed or isinstance(leaf, nn.Parameter)
            elif id(leaf) in self._made:
                self._used[id(leaf)] = self._time
                if id(leaf) not in self._given:
                    self._used_around[id(leaf)] = self._time
                computed = True
        return computed

    def called(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A layer is about to run."""
        self._time += 1
        leaves = pytree.tree_leaves((args, kwargs))
        travels = tuple(at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and id(leaf) in self._made)
        metas = tuple(Meta(tuple(leaves[at].shape), leaves[at].dtype, leaves[at].requires_grad) for at in travels)
        given = frozenset(id(leaves[at]) for at in travels)
        self._used.update(dict.fromkeys(given, self._time))
        self._given = given
        self._calls.append(Call(name, self._time, travels, metas, given))

    def returned(self) -> None:
        """A layer has run."""
        self._given = frozenset()

    def result(self, output: Any) -> Trace:
        """What was seen, with the places where the model can be cut."""
        often = Counter(call.name for call in self._calls)
        for call in self._calls:
            around = sum(
                made < call.time < (self._used_around if tensor in call.given else self._used).get(tensor, 0)
                for tensor, made in self._made.items()
            )
            if often[call.name] > 1:
                call.why_not = f"it is called {often[call.name]} times"
            elif not call.travels:
                call.why_not = "nothing that was computed before goes into it"
            elif around:
                call.why_not = f"{around} of the tensors computed before it pass by it, to be used after it"
        return Trace(self._calls, self._uses, output, [call for call in self._calls if not call.why_not])


def _hook(watch: _Watch, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watch.called(name, args, kwargs)

    return hook
