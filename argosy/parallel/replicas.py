"""Replicas: how all workers come to hold the same model when training begins."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from argosy.comm.agree import check_agreement
from argosy.comm.group import Group


def broadcast_tensor(tensor: Tensor, group: Group) -> None:
    """Replace a tensor of any type and device by that of rank 0."""
    if tensor.numel() == 0 or group.size == 1:
        return
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    group.broadcast(raw)
    if raw.data_ptr() == tensor.data_ptr():
        return  # it was received where it belongs
    with torch.no_grad():
        tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules, each once, from the outside in: what `model.modules()` has, in a fraction of its time.

    They are looked through several times in every step.
    """
    found = {model: None}
    todo = [model]
    for module in todo:
        for child in module._modules.values():
            if child is not None and child not in found:
                found[child] = None
                todo.append(child)
    return todo


def outline(model: nn.Module) -> list[str]:
    """The names, shapes and types of a model's tensors: what replicas must have in common."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [f"{name} {tuple(value.shape)} {value.dtype}" for name, value in tensors.items()]


def make_alike(model: nn.Module, group: Group) -> None:
    """Give every worker rank 0's parameters and buffers; refuse a model that is not the same on all of them."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"parameter {name} has no shape yet; run one batch through the model before distribute")
    check_agreement(f"the parameters and buffers of {type(model).__name__}", outline(model), group)
    for tensor in (*model.parameters(), *model.buffers()):
        broadcast_tensor(tensor, group)
