"""The script's torch optimizer, as a rule that servers apply to dense parameters."""

from __future__ import annotations

from typing import Any, Final

from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from argosy._native import table_config

ADD: Final = table_config(1, "add")

_NUMBERS: Final = ("weight_decay", "eps", "alpha", "momentum", "betas", "nesterov")
"""What a rule takes of a group, besides the learning rate, which is sent with every push."""

# What a group must say for servers to step as torch does; anything else would be ignored silently.
_WANTED: dict[type[Optimizer], dict[str, Any]] = {
    SGD: {"dampening": 0, "maximize": False, "differentiable": False},
    Adagrad: {"lr_decay": 0, "maximize": False, "differentiable": False},
    RMSprop: {"centered": False, "momentum": 0, "maximize": False, "differentiable": False},
    Adam: {"amsgrad": False, "maximize": False, "differentiable": False},
    AdamW: {"amsgrad": False, "maximize": False, "differentiable": False},
}


def dense_rule(optimizer: Optimizer, group: dict[str, Any]) -> bytes:
    """The rule, for native code, that does what `optimizer.step()` does to the parameters of a group.

    >>> import torch
    >>> lbfgs = torch.optim.LBFGS([torch.zeros(1, requires_grad=True)])
    >>> dense_rule(lbfgs, lbfgs.param_groups[0])
    Traceback (most recent call last):
    TypeError: LBFGS steps on the workers, and with dense=server the servers step: use torch.optim.SGD, Adagrad, \
RMSprop, Adam or AdamW, or dense=allreduce
    """
    kind = type(optimizer)
    if kind not in _WANTED:
        raise TypeError(
            f"{kind.__name__} steps on the workers, and with dense=server the servers step: use torch.optim.SGD, "
            f"Adagrad, RMSprop, Adam or AdamW, or dense=allreduce"
        )
    for name, wanted in _WANTED[kind].items():
        if group[name] != wanted:
            raise ValueError(
                f"{kind.__name__}({name}={group[name]}): servers step with {name}={wanted} only; use that, or "
                f"dense=allreduce"
            )
    numbers: dict[str, Any] = {
        name: float(group[name]) for name in ("weight_decay", "eps", "alpha", "momentum") if name in group
    }
    numbers["lr"] = 1.0  # the group's own is sent with every push
    if kind is SGD:
        return table_config(1, "momentum" if group["momentum"] else "sgd", **numbers, nesterov=group["nesterov"])
    if kind is Adagrad:
        return table_config(1, "adagrad", **numbers, initial_accumulator=float(group["initial_accumulator_value"]))
    if kind is RMSprop:
        return table_config(1, "rmsprop", **numbers)
    decoupled = kind is AdamW or group.get("decoupled_weight_decay", False)
    beta1, beta2 = map(float, group["betas"])
    return table_config(1, "adamw" if decoupled else "adam", **numbers, beta1=beta1, beta2=beta2)


def settings(group: dict[str, Any]) -> dict[str, Any]:
    """What servers have been told of a group once, and cannot be told anew.

    >>> import torch
    >>> settings(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9).param_groups[0])
    {'weight_decay': 0, 'momentum': 0.9, 'nesterov': False}
    """
    return {name: group[name] for name in _NUMBERS if name in group}


def bears_nothing(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether a gradient of zero does nothing, as no gradient does: to the value, and to what is remembered.

    >>> import torch
    >>> [bears_nothing(each, each.param_groups[0]) for each in (SGD([torch.zeros(1)]), AdamW([torch.zeros(1)]))]
    [True, False]
    """
    return not group["weight_decay"] and (
        isinstance(optimizer, Adagrad) or (isinstance(optimizer, SGD) and not group["momentum"])
    )
