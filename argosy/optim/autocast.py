"""Autocast around a model: it computes in 16 bits, and the script sees fp32.

The model stays the object that the script knows, its parameters stay fp32, and so do their gradients. Outputs come
back as fp32, so that a loss outside the model is computed in full.

[Note: forward, not hooks]
The instance's `forward` is replaced, for all ways to run a model lead through it: calling the model, calling
`model.forward`, `torch.compile(model)` and `model.compile()`, whose tracer follows a `with` but not a context that one
hook enters and another one leaves. The replacement is a plain object that can be copied and pickled with the model.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from argosy.optim.attention import attend_in_full
from argosy.optim.tiles import warn_of_hidden_tiles

_SHORT = (torch.float16, torch.bfloat16)


class AutocastForward:
    """What stands in for a model's `forward`."""

    def __init__(
        self, forward: Callable[..., Any], device: str, dtype: torch.dtype, guard: Callable[[], None] | None
    ) -> None:
        self.forward, self.device, self.dtype, self.guard = forward, device, dtype, guard

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        if self.guard is not None:
            self.guard()
        with torch.autocast(self.device, self.dtype):
            output = self.forward(*args, **kwargs)
        return full(output)


class Autocast:
    """The handle of a model under autocast: `close()` gives it its own forward back."""

    def __init__(self, model: nn.Module, ours: AutocastForward) -> None:
        self._model, self._ours = model, ours
        self._before = model.__dict__.get("forward")
        model.forward = ours

    def close(self) -> None:
        """Undo it, unless somebody has replaced `forward` since."""
        if self._model.__dict__.get("forward") is not self._ours:
            return
        if self._before is None:
            del self._model.forward
        else:
            self._model.forward = self._before


def autocast_forward(model: nn.Module, dtype: torch.dtype, guard: Callable[[], None] | None = None) -> Autocast:
    """Let a model compute in `dtype`; `guard` is called before each forward pass and may refuse it.

    >>> net = nn.Linear(4, 2)
    >>> handle = autocast_forward(net, torch.bfloat16)
    >>> net(torch.ones(1, 4)).dtype, net.weight.dtype
    (torch.float32, torch.float32)
    >>> handle.close()
    """
    if dtype not in _SHORT:
        raise ValueError(f"autocast computes in torch.bfloat16 or torch.float16, not in {dtype}")
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if device == "cpu":
        attend_in_full()
        warn_of_hidden_tiles()
    return Autocast(model, AutocastForward(model.forward, device, dtype, guard))


def full(value: Any) -> Any:
    """The value with every 16-bit tensor in it, however deep, as fp32.

    >>> full({"logits": torch.ones(1, dtype=torch.bfloat16), "n": 3})
    {'logits': tensor([1.]), 'n': 3}
    """
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _SHORT else value
    if type(value) is dict:
        return {key: full(item) for key, item in value.items()}
    if isinstance(value, MutableMapping):
        kept = copy.copy(value)  # an output's own class may not be made from a plain dict
        for key, item in value.items():
            kept[key] = full(item)
        return kept
    if isinstance(value, (list, tuple)):
        items = [full(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: full(getattr(value, name)) for name in fields})
    return value
