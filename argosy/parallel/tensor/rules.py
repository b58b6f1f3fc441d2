"""What DTensors lack for a model's own code to run on them as it is written.

While a model computes, every function of torch that it calls with a DTensor passes here:
- DTensors that every rank has whole (parameters that a model's own code uses) are computed with as plain ones: faster;
- a plain tensor beside a DTensor is one that all ranks have, so it becomes a replicated one (a mask, a parameter);
- a fused q, k and v, each of which is divided, is taken apart where it lies (`fused.py`);
- attention and cross-entropy are computed divided, other losses from whole tensors;
- what DTensor has no rule for is computed from whole tensors, as one process does;
- a change in place that would be lost is refused (`changes.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from argosy.config import ConfigError
from argosy.parallel.tensor import fused
from argosy.parallel.tensor.attention import scaled_dot_product
from argosy.parallel.tensor.changes import changed, is_copy, mark, sets_a_copy
from argosy.parallel.tensor.crossing import REPLICATE, plain, unwrap, wrap
from argosy.parallel.tensor.loss import cross_entropy
from argosy.parallel.tensor.region import Region


class Rules(TorchFunctionMode):
    """Active while a model of this region computes."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self._region, self._warned = region, set[str]()
        self._special: dict[Any, Callable[..., Any]] = {
            F.cross_entropy: cross_entropy,
            F.scaled_dot_product_attention: lambda *args, **kwargs: scaled_dot_product(region, *args, **kwargs),
            **{loss: partial(_of_whole, loss) for loss in _LOSSES},
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch by the rules."""
        kwargs = kwargs or {}
        kinds = _kinds(args) | (_kinds(kwargs.values()) if kwargs else 0)
        target = changed(func, args, kwargs)
        if target is not None and is_copy(target):
            raise self._lost(func)
        result = self._call(func, args, kwargs, kinds, target)
        mark(func, args, result, is_divided=bool(kinds & _DIVIDED))
        return result

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any], kinds: int, target: Tensor | None) -> Any:
        changes_a_dtensor = isinstance(target, DTensor)
        if not kinds & _DIVIDED:
            if not kinds & _WHOLE or fused.keeps(func):
                return func(*args, **kwargs)
            if changes_a_dtensor:  # it gives the tensor that was changed: the DTensor itself, wherever torch can
                with suppress(NotImplementedError):
                    lifted, named = tree_map_only(Tensor, self._lift, (args, kwargs))
                    return func(*lifted, **named)
            args, kwargs = tree_map_only(DTensor, unwrap, (args, kwargs))
            return func(*args, **kwargs)
        if kinds & _FUSED:
            if (given := fused.call(func, args, kwargs)) is not NotImplemented:
                return given
            args, kwargs = tree_map_only(DTensor, lambda each: self._gathered(func, each), (args, kwargs))
        if (special := self._special.get(func)) is not None:
            return special(*args, **kwargs)
        if kinds & _PLAIN:
            # A plain tensor that is changed in place cannot become another one: it takes whole values.
            change = plain if target is not None and not changes_a_dtensor else self._lift
            args, kwargs = tree_map_only(Tensor, change, (args, kwargs))
        if changes_a_dtensor and sets_a_copy(func, args):
            raise self._lost(func)
        try:
            return func(*args, **kwargs)
        except NotImplementedError as error:
            if changes_a_dtensor:
                raise self._lost(func) from error
            return _of_whole(func, *args, **kwargs)
        except RuntimeError as error:
            if "unevenly sharded" not in str(error):
                raise
            raise self._uneven(func, args) from error

    def _lift(self, tensor: Tensor) -> Tensor:
        # torch takes plain numbers as they are, but would hand a loss among them a gradient that is not plain.
        if isinstance(tensor, DTensor) or not (tensor.dim() or tensor.requires_grad):
            return tensor
        return wrap(tensor, self._region.mesh, REPLICATE)

    def _gathered(self, func: Any, tensor: DTensor) -> DTensor:
        if not fused.is_fused(tensor):
            return tensor
        name = self._region.latest
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"{getattr(func, '__name__', func)} does not take the parts of {name} one by one, so they are gathered "
                f"in each pass; if its heads come before q, k and v, say tensor_plan={name}:column",
                stacklevel=4,
            )
        return tensor.redistribute(placements=(REPLICATE,))

    def _lost(self, func: Any) -> RuntimeError:
        name = self._region.latest
        return RuntimeError(
            f"{getattr(func, '__name__', func)} changes a part of a divided tensor in place (the last layer to divide "
            f"one was {name}); that part is a copy here, and the change would be lost: write it so that it gives a new "
            f"tensor, or say tensor_plan={name}:replicate"
        )

    def _uneven(self, func: Any, args: Any) -> ConfigError:
        name, size = self._region.latest, self._region.size
        said = ", ".join(str(tuple(each.shape) if isinstance(each, Tensor) else each) for each in args)
        return ConfigError(
            "tensor",
            size,
            f"the output of {name} is divided among {size} ranks, and {getattr(func, '__name__', func)}({said}) has a "
            f"number (of heads?) that does not divide by {size}; choose a tensor= that divides it, or "
            f"tensor_plan={name}:replicate",
        )


# DTensor's gradients of these are wrong where a mean is over what is divided (seen of mse_loss, along the sequence).
_LOSSES: tuple[Callable[..., Tensor], ...] = (
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.nll_loss, F.binary_cross_entropy),
    *(F.binary_cross_entropy_with_logits, F.soft_margin_loss, F.poisson_nll_loss, F.gaussian_nll_loss),
)


def _of_whole(func: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = tree_map_only(Tensor, plain, (args, kwargs))
    return func(*args, **kwargs)


_PLAIN, _DIVIDED, _FUSED, _WHOLE = 1, 2, 4, 8


def _kinds(arguments: Any) -> int:
    """Which kinds of tensors are among a call's arguments."""
    kinds = 0
    for each in arguments:
        if isinstance(each, DTensor):
            if each.placements == (REPLICATE,):
                kinds |= _WHOLE
            else:
                kinds |= _DIVIDED | _FUSED if fused.is_fused(each) else _DIVIDED
        elif isinstance(each, Tensor):
            kinds |= _PLAIN
        elif isinstance(each, list | tuple):
            kinds |= _kinds(each)
    return kinds
