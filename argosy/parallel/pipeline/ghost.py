"""A model without its numbers: the same modules, with tensors that have a shape and a type and no memory.

Running it tells what shapes come out of each layer, on every worker alike and without a message between them. It is
made before anything is freed, sharded or wrapped, and nothing ever changes it.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

_OUTPUTS_KEPT = 1 << 14


class Ghost:
    """The model of shapes. `module` has the same names as the model."""

    def __init__(self, model: nn.Module) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        known: dict[int, Any] = {}
        # As torch.nn.utils.weight_norm has them: what comes of other tensors cannot be copied, and is computed anew.
        computed = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
        for tensor in (*model.parameters(), *model.buffers(), *computed):
            known.setdefault(id(tensor), self._empty(tensor))
        self.module: nn.Module = copy.deepcopy(model, known)
        self.named: dict[str, Tensor] = {
            **dict(self.module.named_parameters()),
            **dict(self.module.named_buffers()),
        }
        self._outputs: dict[Hashable, Any] = {}

    def shapes(self, value: Any) -> Any:
        """The value with its tensors as tensors without numbers."""

        def shape(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
                return leaf
            return self._empty(leaf)

        return pytree.tree_map(shape, value)

    def output(
        self, name: str, turn: Hashable, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool
    ) -> Any:
        """What a layer returns, in shapes. It is computed once for arguments of the same shapes.

        `turn` tells calls apart whose outputs are around at the same time: they must not be the same tensors.
        """
        key = (name, turn, training, signature((args, dict(kwargs))))
        if key not in self._outputs:
            if len(self._outputs) >= _OUTPUTS_KEPT:
                self._outputs.clear()
            layer = self.module.get_submodule(name).train(training)
            with self.mode, torch.no_grad():
                self._outputs[key] = layer(*self.shapes(args), **self.shapes(dict(kwargs)))
        return self._outputs[key]

    def follow(self, model: nn.Module) -> None:
        """Take over which modules train and which evaluate."""
        for mine, theirs in zip(self.module.modules(), model.modules(), strict=True):
            mine.training = theirs.training

    def _empty(self, tensor: Tensor) -> Tensor:
        device = "cpu" if tensor.device.type == "meta" else tensor.device
        with self.mode:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(empty, requires_grad=tensor.requires_grad)
        return empty.requires_grad_(tensor.requires_grad)


def is_ghostly(value: Any) -> bool:
    """Whether a tensor without numbers is among the value's leaves."""
    return any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(value))


def signature(value: Any) -> Hashable:
    """The shapes and types of the tensors in a value, and what else is in it."""
    leaves, spec = pytree.tree_flatten(value)
    told = [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else _plain(leaf) for leaf in leaves]
    return (*told, str(spec))


def _plain(leaf: Any) -> Hashable:
    return leaf if isinstance(leaf, (int, float, str, bytes, bool, type(None), torch.dtype)) else repr(leaf)
