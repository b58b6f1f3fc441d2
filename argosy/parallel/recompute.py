"""Activation recomputation: blocks that forget what they computed in forward, and compute it again in backward.

A block under it keeps its inputs only. What it costs is one more forward pass of the block; what comes out is the
same to the bit, dropout included. The block's `forward` is replaced, as autocast replaces a model's: the replacement
runs within whatever hooks the block has.

[Note: as many as it takes]
`auto` looks at the first training step: how much each block keeps for backward, and how much memory the worker has
free. From the next step on, as few blocks as fit are recomputed. Workers may decide differently; results do not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from argosy.parallel.blocks import repeated_blocks, span
from argosy.parallel.hooks import Hook
from argosy.parallel.memory import available_bytes

_ROOM: Final = 0.5  # of the memory that is free, how much activations may take


class RecomputedForward:
    """What stands in for a block's `forward`."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward, self.active = forward, True
        self.kept_bytes: int | None = None  # what a pass keeps for backward, once it is measured
        self.measures = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if self.active:
            return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)
        return self._measured(*args, **kwargs) if self.measures else self.forward(*args, **kwargs)

    def _measured(self, *args: Any, **kwargs: Any) -> Any:
        seen: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output = self.forward(*args, **kwargs)
        self.kept_bytes = sum(seen.values())
        return output


class Recompute:
    """The blocks of a model that are recomputed."""

    def __init__(self, model: nn.Module, every: int | None, workers_here: int, show: Callable[[str], None]) -> None:
        """`every`: of how many blocks one is recomputed; None lets memory decide, shared with `workers_here`."""
        blocks = repeated_blocks(model)
        if not blocks:
            raise ValueError(
                f"recompute= acts on the blocks of a model, and {type(model).__name__} repeats none in a ModuleList or "
                f"nn.Sequential; leave it out"
            )
        self._names, self._show, self._workers_here = list(blocks), show, workers_here
        self._blocks = list(blocks.values())
        self.forwards = [RecomputedForward(block.forward) for block in self._blocks]
        for number, (block, forward) in enumerate(zip(self._blocks, self.forwards, strict=True)):
            block.forward = forward
            forward.active = every is not None and number % every == every - 1
            forward.measures = every is None
        self._hook = model.register_forward_pre_hook(Hook(self._look)) if every is None else None
        if every is not None:
            self._tell([name for name, f in zip(self._names, self.forwards, strict=True) if f.active], "")

    def close(self) -> None:
        """Give the blocks their own forward back."""
        if self._hook is not None:
            self._hook.remove()
        for block, forward in zip(self._blocks, self.forwards, strict=True):
            if block.__dict__.get("forward") is forward:
                del block.forward

    def _look(self, *_: Any) -> None:
        """Before a pass: if the last one has shown what blocks keep, decide; see [Note: as many as it takes]."""
        known = [forward.kept_bytes for forward in self.forwards]
        if self._hook is None or any(kept is None for kept in known):
            return
        self._hook.remove()
        self._hook = None
        free = free_bytes() / self._workers_here
        # The last pass has been freed, or still is in memory: either way this is what there is besides.
        total, allowed = sum(kept or 0 for kept in known), _ROOM * free
        chosen = []
        for name, forward in zip(self._names, self.forwards, strict=True):
            forward.measures = False
            if total > allowed:
                forward.active = True
                total -= forward.kept_bytes or 0
                chosen.append(name)
        self._tell(chosen, f" (blocks keep {sum(k or 0 for k in known) / 1e6:.3g} MB, {free / 1e6:.3g} MB are free)")

    def _tell(self, chosen: list[str], why: str) -> None:
        which = f"{len(chosen)} of {len(self._names)} blocks" + (f", {span(chosen)}" if chosen else "")
        self._show(f"recomputed in backward: {which}{why}")


def free_bytes() -> float:
    """The memory that is free: the GPU's that this process uses or, without one, the host's or the container's."""
    if torch.cuda.is_available():
        return float(torch.cuda.mem_get_info()[0])
    return available_bytes()
