"""Sharding stage 1: each worker of the shard axis keeps the optimizer's states of its part of every parameter.

Parameters and gradients stay whole and plain, so the data parallel path is as it was, with its codecs and its overlap,
and whoever clips or logs sees what one process sees. Only within a step does the optimizer hold something else: of each
parameter a DTensor whose local part is a view of this worker's rows, so what the optimizer writes lands in the
parameter. The states that it makes have the same layout. After the step each worker collects the others' rows.

An optimizer sees whole tensors of which it holds a part: norms of layers, as LARS and LAMB need, come out right.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from argosy.parallel.sharding.rows import Rows, bounds


class ShardedStates:
    """Makes an optimizer's steps those of this worker's part. `mesh` is the shard axis.

    With `offload`, the part is a copy in the memory of the host, where `mesh` is too: the optimizer steps there, and
    keeps its states there.
    """

    def __init__(self, optimizer: Optimizer, mesh: DeviceMesh, *, offload: bool = False) -> None:
        self._optimizer, self._mesh, self._offload = optimizer, mesh, offload
        self._parts: dict[nn.Parameter, _Part] = {}
        self._whole: list[list[nn.Parameter]] | None = None  # the groups' parameters, while parts stand in for them
        self._rows = Rows(mesh.get_group())
        self._hooks: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(lambda _: self._stand_in()),
            optimizer.register_state_dict_post_hook(lambda *_: self._stand_back()),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(lambda _: self._stand_back()),
        ]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in optimizer.state:  # it has taken steps before
                    state = optimizer.state.pop(parameter)
                    optimizer.state[self._part(parameter).tensor] = self._divided(state, parameter)

    def close(self) -> None:
        """Leave the optimizer to itself."""
        for hook in self._hooks:
            hook.remove()

    def _part(self, parameter: nn.Parameter) -> _Part:
        if parameter not in self._parts:
            self._parts[parameter] = _Part(parameter, self._mesh, self._offload)
        return self._parts[parameter]

    def _stand_in(self) -> None:
        self._stand_back()  # a step that has failed left them where they were
        self._whole = [group["params"] for group in self._optimizer.param_groups]
        for group, whole in zip(self._optimizer.param_groups, self._whole, strict=True):
            group["params"] = [self._part(parameter).tensor for parameter in whole]

    def _stand_back(self) -> None:
        if self._whole is not None:
            for group, whole in zip(self._optimizer.param_groups, self._whole, strict=True):
                group["params"] = whole
        self._whole = None

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(closure is not None for closure in (*args[1:], *kwargs.values())):  # the first is the optimizer
            raise NotImplementedError(
                "shard_stage=1 divides a step among workers, and a closure runs the model within it; call "
                "backward() first and then optimizer.step() without a closure, or use shard_stage=2"
            )
        self._stand_in()
        assert self._whole is not None
        for parameter in (parameter for whole in self._whole for parameter in whole):
            self._part(parameter).take(parameter.grad)

    def _after_step(self, *_: Any) -> None:
        assert self._whole is not None
        stepped = [p for whole in self._whole for p in whole if p.grad is not None]
        self._stand_back()
        for parameter in stepped:
            self._part(parameter).give()
        self._rows.gather(stepped)

    def _before_load(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """States may come whole or divided."""
        self._stand_in()
        assert self._whole is not None
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        parameters = [parameter for whole in self._whole for parameter in whole]
        kept = {
            number: self._divided(state["state"][number], parameter)
            for number, parameter in zip(numbers, parameters, strict=False)
            if number in state["state"]
        }
        return {**state, "state": {**state["state"], **kept}}

    def _divided(self, state: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
        part = self._part(parameter).tensor
        return {name: _laid_out(value, part) for name, value in state.items()}


class _Part:
    """This worker's rows of a parameter, as the optimizer sees them."""

    def __init__(self, parameter: nn.Parameter, mesh: DeviceMesh, offload: bool) -> None:
        self._parameter, self._mesh, self._offload = parameter, mesh, offload
        self._placements: list[Placement] = [Shard(0) if parameter.dim() else Replicate()]
        self.tensor = nn.Parameter(self._wrapped(self._stored(parameter.detach())), parameter.requires_grad)

    def take(self, gradient: Tensor | None) -> None:
        """The gradient of this step."""
        self._follow()
        if gradient is not None and gradient.layout != torch.strided:
            raise NotImplementedError(
                f"the gradient of a parameter of shape {tuple(self._parameter.shape)} is sparse, and shard_stage=1 "
                f"divides dense ones; use sparse=False in its layer"
            )
        self.tensor.grad = None if gradient is None else self._wrapped(self._stored(gradient))

    def _follow(self) -> None:
        """Rows are a view of the parameter, whose numbers may be elsewhere by now: `p.data` was assigned."""
        part, rows = cast(DTensor, self.tensor), self._rows(self._parameter.detach())
        if (rows.shape, rows.dtype) != (part._local_tensor.shape, part.dtype):
            raise RuntimeError(
                f"a parameter of shape {tuple(part.shape)} was {part.dtype} when its optimizer was distributed, and is "
                f"{tuple(self._parameter.shape)}, {rows.dtype}: convert the model before"
            )
        if self._offload:
            part._local_tensor.detach().copy_(rows)
        elif rows.data_ptr() != part._local_tensor.data_ptr():
            part._local_tensor = rows

    def give(self) -> None:
        """What the optimizer has written is the parameter's, also if it was written to a copy."""
        self.tensor.grad = None
        if self._offload:
            self._rows(self._parameter.detach()).copy_(cast(DTensor, self.tensor).to_local())

    def _rows(self, whole: Tensor) -> Tensor:
        if not whole.dim():
            return whole
        begin, end = bounds(whole.shape[0], self._mesh.size(), self._mesh.get_local_rank())
        return whole[begin:end]

    def _stored(self, whole: Tensor) -> Tensor:
        rows = self._rows(whole)
        return rows.to("cpu", copy=True) if self._offload else rows

    def _wrapped(self, rows: Tensor) -> DTensor:
        shape, stride = self._parameter.shape, self._parameter.stride()
        return DTensor.from_local(rows, self._mesh, self._placements, run_check=False, shape=shape, stride=stride)


def _laid_out(value: Any, part: Tensor) -> Any:
    """A state of the parameter's shape, laid out as the parameter's part is. Each worker has it: nothing is sent."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or value.shape != part.shape:
        return value
    assert isinstance(part, DTensor)
    return distribute_tensor(value, part.device_mesh, part.placements, src_data_rank=None)
