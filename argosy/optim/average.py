"""An exponential moving average of a model's parameters: a smoother model than any step's own, for nearly nothing.

After each step of the optimizer, average = decay * average + (1 - decay) * parameters. Replicas hold the same bits, so
their averages do too, and nothing is communicated.

*Buffers* with fractions, such as the running statistics of batch norm, are averaged with the parameters: those of the
last step belong to other weights. Buffers of whole numbers, and constants that are not finite (a mask of -inf), stay
the model's own.

*The beginning.* A fixed decay would remember the random start for thousands of steps. So step n, from 0, uses the
smaller of `decay` and (1 + n) / (10 + n): the average is about the last tenth of the run until `decay` takes over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from argosy.optim.gradients import takes_step


class Average:
    """The moving average of one model. It holds one more copy of the model, in fp32 or better.

    >>> net = nn.Linear(1, 1, bias=False)
    >>> average = Average(net, decay=0.9)
    >>> average.update()
    >>> with average.applied():
    ...     evaluated = net(torch.ones(1, 1))
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay={decay}: how much each step keeps lies between 0 and 1, such as 0.999")
        self.model, self.decay, self.updates = model, decay, 0
        self._applied = False
        self._hook: RemovableHandle | None = None
        # 16 bits cannot hold a sum to which each step adds a thousandth.
        self._kept = {name: _wide(tensor).clone() for name, tensor in _averaged(model)}

    def attach(self, optimizer: Optimizer) -> Average:
        """From now on, follow the steps of this optimizer."""
        self._hook = optimizer.register_step_post_hook(self._stepped)
        return self

    def close(self) -> None:
        """Follow no more steps."""
        if self._hook is not None:
            self._hook.remove()

    @torch.no_grad()
    def update(self) -> None:
        """Take the model's present parameters in. An attached average does it by itself."""
        if self._applied:
            raise RuntimeError("the model holds its average now, so it cannot be trained: end `applied()` first")
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for kept, live in self._pairs():
            torch._foreach_lerp_(kept, [_wide(tensor) for tensor in live], 1 - decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew with the model's present parameters, which were loaded, say."""
        self.updates = 0
        for name, live in self._live():
            self._kept[name].copy_(live)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within, the model holds its averaged parameters: to evaluate it, or to save it. Not to train it."""
        if self._applied:
            raise RuntimeError("the model holds its average already: applied() does not nest")
        with torch.no_grad():
            own = [[tensor.clone() for tensor in live] for _, live in self._pairs()]
        self._applied = True
        try:
            with torch.no_grad():
                for kept, live in self._pairs():
                    _copy(live, kept)
            yield
        finally:
            with torch.no_grad():
                for (_, live), tensors in zip(self._pairs(), own, strict=True):
                    _copy(live, tensors)
            self._applied = False

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the average, and how many steps are in it."""
        return {"updates": self.updates, "average": dict(self._kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue an earlier average of the same model."""
        given: dict[str, Tensor] = state["average"]
        if unlike := sorted(given.keys() ^ self._kept.keys()):
            raise ValueError(f"this average is of another model: {unlike[0]} is in one of the two only")
        for name, tensor in given.items():
            if tensor.shape != self._kept[name].shape:
                raise ValueError(
                    f"this average is of another model: {name} has the shape {tuple(tensor.shape)} there and "
                    f"{tuple(self._kept[name].shape)} here"
                )
        self.updates = int(state["updates"])
        for name, tensor in given.items():
            self._kept[name].copy_(tensor)

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if takes_step(optimizer):
            self.update()

    def _live(self) -> Iterator[tuple[str, Tensor]]:
        """What is averaged, as the model has it now: modules may assign other buffers, not only change them."""
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        yield from ((name, tensors[name]) for name in self._kept)

    def _pairs(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """The average and the model, by device and type: foreach operations are fast on lists of one kind."""
        kinds: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for name, live in self._live():
            kept, lives = kinds.setdefault((live.device, live.dtype), ([], []))
            kept.append(self._kept[name])
            lives.append(live)
        yield from kinds.values()


def _averaged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            yield name, parameter
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and bool(buffer.isfinite().all()):
            yield name, buffer


def _copy(to: list[Tensor], tensors: list[Tensor]) -> None:
    for one, other in zip(to, tensors, strict=True):  # parameters in parts have no foreach operation for it
        one.copy_(other)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.detach()
