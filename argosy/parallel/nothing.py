"""A worker without a sample: how a model and a loss bear an empty batch.

In the last step of an epoch a job may have fewer samples than workers. A worker that gets none still runs the script's
loop, since the others wait for its gradients, but with an empty batch, which many models cannot take and of which
the mean loss is 0 / 0. So the model is given a few samples of zeros in its place, its output is cut to what the script
expects, nothing, and a number computed from that nothing is 0 instead of NaN. All that comes of it has weight 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from argosy.data.empty import STAND_INS
from argosy.parallel.hooks import Hook


class Nothing(Tensor):
    """An output with no sample in it. The means computed from it are 0, so that a script may add them up.

    >>> output = torch.ones(0, 3).as_subclass(Nothing)
    >>> float(nn.functional.cross_entropy(output, torch.ones(0, dtype=torch.long)))
    0.0
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function; a single number that comes out is not NaN."""
        parent: Any = super()
        result = parent.__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, cls) and result.dim() == 0 and result.is_floating_point():
            return torch.nan_to_num(result.as_subclass(Tensor)).as_subclass(cls)
        return result


def tolerate_empty_batches(model: nn.Module, is_empty: Callable[[], bool]) -> list[RemovableHandle]:
    """Let the model run on an empty batch while `is_empty()` says that this worker has no sample."""
    standing_in = False

    def stand_in(_: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal standing_in

        def filled(value: Any) -> Any:
            nonlocal standing_in
            if isinstance(value, Tensor) and 0 in value.shape:
                standing_in = True
                return value.new_zeros([size or STAND_INS for size in value.shape])
            return value

        standing_in = False
        return pytree.tree_map(filled, (args, kwargs)) if is_empty() else None

    def cut_off(_: nn.Module, __: Any, output: Any) -> Any:
        return pytree.tree_map(_cut, output) if standing_in else None

    return [
        model.register_forward_pre_hook(Hook(stand_in), with_kwargs=True),
        model.register_forward_hook(Hook(cut_off)),
    ]


def _cut(value: Any) -> Any:
    """Nothing, along the dimension that counts the stand-ins: mostly the first, in time-first models the second."""
    if not isinstance(value, Tensor) or not value.dim():
        return value
    dim = value.shape.index(STAND_INS) if STAND_INS in value.shape else 0
    return value.narrow(dim, 0, 0).as_subclass(Nothing)
