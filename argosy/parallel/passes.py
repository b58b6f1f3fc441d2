"""The end of backward passes: when a model's gradients of one pass are all there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


class Passes:
    """Calls `ended` after each backward pass that has reached a parameter of the model."""

    def __init__(self, model: nn.Module, ended: Callable[[], None]) -> None:
        self._model, self._ended = model, ended
        self._listening: set[nn.Parameter] = set()
        self._running: set[int] = set()
        # A frozen parameter may be unfrozen during training: look again at every forward pass.
        self._hooks: list[RemovableHandle] = [model.register_forward_pre_hook(lambda *_: self._listen())]
        self._listen()

    def close(self) -> None:
        """Listen no more."""
        for hook in self._hooks:
            hook.remove()

    def _listen(self) -> None:
        for parameter in self._model.parameters():
            if parameter.requires_grad and parameter not in self._listening:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._arrived))
                self._listening.add(parameter)

    def _arrived(self, _: Tensor) -> None:
        autograd: Any = torch._C
        this_pass = autograd._current_graph_task_id()
        if this_pass not in self._running:
            self._running.add(this_pass)
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: self._end(this_pass))

    def _end(self, this_pass: int) -> None:
        self._running.discard(this_pass)
        self._ended()
