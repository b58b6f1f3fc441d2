"""How a worker runs its part of a model whose forward it did not write.

The model's own forward runs on every stage, from its first line, with the stage's own inputs. Calls of layers go
through a gate. Before the stage's first layer nothing is computed: layers return tensors without numbers (`ghost.py`),
and what the forward does with these costs next to nothing. At the first layer of the stage, what the stage before has
sent takes the place of the ghostly arguments, and layers run from there on. At the first layer of the next stage the
forward is left by an exception, with the arguments of that call, which are what is sent on. So any forward can be cut
that is a chain in what it computes, whatever Python is around it; no layer is called that is not the stage's.

A gate sits in the class of a module, so that a call meets it before any hook: a layer that is skipped is not gathered
by `fully_shard`, for example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from argosy.parallel.pipeline.ghost import Ghost, is_ghostly

_GATE: Final = "_pipeline_gate"
_SENT: Final = "_pipeline_sent"
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Stop(BaseException):
    """The forward has reached the next stage. Not an Exception: a model's own `except Exception` must not catch it."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        super().__init__("the stage ends here")
        self.tensors = tensors


class Run(ABC):
    """One forward pass through the gates."""

    @abstractmethod
    def layer(self, name: str, module: nn.Module, arguments: Arguments, call: Callable[..., Any]) -> Any:
        """A layer is called: run it with `call`, or do something else."""


class Gate:
    """The gates of one model. Outside of a run, calling the model itself is an error that says `instead`."""

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module], instead: str) -> None:
        self._model, self._instead = model, instead
        self._names = {id(module): name for name, module in layers.items()}
        self._run: Run | None = None
        self._gated = [model, *layers.values()]
        classes: dict[type[nn.Module], type[nn.Module]] = {}
        for module in self._gated:
            own = type(module)
            if own not in classes:
                classes[own] = _gated(own)
            module.__class__ = classes[own]
            module.__dict__[_GATE] = self

    @contextmanager
    def open(self, run: Run) -> Iterator[None]:
        """Calls of layers in this block are this run's."""
        assert self._run is None
        self._run = run
        try:
            yield
        finally:
            self._run = None

    def close(self) -> None:
        """Give the modules their own classes back."""
        for module in self._gated:
            own = getattr(type(module), "_own_class", None)
            if module.__dict__.pop(_GATE, None) is self and own is not None:
                module.__class__ = own

    def called(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[..., Any]) -> Any:
        """The model or one of its layers was called."""
        if module is self._model:
            if self._run is None:
                raise RuntimeError(self._instead)
            return call(module, *args, **kwargs)
        name = self._names[id(module)]
        if self._run is not None:
            return self._run.layer(name, module, (args, kwargs), lambda *a, **k: call(module, *a, **k))
        args, kwargs = substituted((args, kwargs))  # torch.utils.checkpoint calls a layer again in backward
        if is_ghostly((args, kwargs)):
            raise RuntimeError(f"layer {name} was called outside of a step, with what this worker has not computed")
        return call(module, *args, **kwargs)


class StageRun(Run):
    """A forward pass of one stage: from the layer `begin` (None: from the beginning) up to the layer `end`."""

    def __init__(
        self,
        ghost: Ghost,
        begin: str | None,
        end: str | None,
        micro_batch: int,
        received: tuple[Tensor, ...],
        travels: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._ghost, self._begin, self._end, self._micro_batch = ghost, begin, end, micro_batch
        self._received, self._travels = received, travels
        self._inside = begin is None
        self._skipped = 0

    def layer(self, name: str, module: nn.Module, arguments: Arguments, call: Callable[..., Any]) -> Any:
        """Skip a layer before the stage; run those of the stage; leave at the first one behind it."""
        if not self._inside and name == self._begin:
            self._inside = True
            leaves = pytree.tree_leaves(arguments)
            for at, tensor in zip(self._travels[name], self._received, strict=True):
                setattr(leaves[at], _SENT, writable(tensor))
        args, kwargs = arguments
        if not self._inside:
            self._skipped += 1
            turn = (self._begin, self._micro_batch, self._skipped)
            given = not any(True for _ in self._ghost.module.get_submodule(name).parameters())
            if given and not is_ghostly(arguments):
                return call(*args, **kwargs)  # made from the inputs alone, such as a mask
            return self._ghost.output(name, turn, args, kwargs, module.training)
        if self._begin is not None:
            args, kwargs = substituted(arguments)
        if name == self._end:
            leaves = pytree.tree_leaves((args, kwargs))
            raise Stop(tuple(leaves[at] for at in self._travels[name]))
        return call(*args, **kwargs)


def substituted(arguments: Arguments) -> Arguments:
    """The arguments of a call, with what was received in the place of ghostly tensors.

    It is kept by the ghostly tensor itself: the forward may hand that to several layers, and `torch.utils.checkpoint`
    keeps it for backward.
    """
    args, kwargs = pytree.tree_map(lambda leaf: getattr(leaf, _SENT, leaf), arguments)
    return args, kwargs


def writable(tensor: Tensor) -> Tensor:
    """A leaf of autograd may not be changed in place, and a layer may begin with just that."""
    return tensor.clone() if tensor.requires_grad else tensor


def _gated(own: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        gate = self.__dict__.get(_GATE)
        if gate is None:
            return own.__call__(self, *args, **kwargs)
        return gate.called(self, args, kwargs, own.__call__)

    body = {"__call__": call, "__module__": own.__module__, "__doc__": own.__doc__, "_own_class": own}
    return type(own.__name__, (own,), body)
