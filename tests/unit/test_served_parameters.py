"""Dense parameters on servers: what is handed over, and what servers could not do as torch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from argosy.comm.group import SoloGroup
from argosy.ps.dense import ServedParameters


class Vectors:
    """What stands for servers: vectors, and what came for them last."""

    compensates = False

    def __init__(self) -> None:
        self.values: dict[int, Tensor] = {}
        self.pushed: dict[int, tuple[Tensor, float]] = {}

    def open_vector(self, number: int, config: bytes, numbers: int) -> None:
        self.values[number] = torch.zeros(numbers)

    def set_vector(self, number: int, values: Tensor) -> None:
        self.values[number] = values

    def settle(self) -> None:
        pass

    def pull_vector(self, number: int, numbers: int, *, in_step: bool = True) -> Tensor:
        return self.values[number]

    def push_vector(self, number: int, gradient: Tensor, lr_factor: float, pulled: Tensor | None) -> None:
        self.pushed[number] = gradient.clone(), lr_factor


def served(
    kind: Any = torch.optim.AdamW, rejects: bool = True, **options: Any
) -> tuple[nn.ParameterList, Any, ServedParameters, Vectors]:
    parameters = nn.ParameterList([torch.ones(2), torch.ones(3)])
    parameters[1].requires_grad_(not options.pop("frozen", False))
    optimizer, vectors = kind(parameters.parameters(), **options), Vectors()
    names = {parameter: name for name, parameter in parameters.named_parameters()}
    dense = ServedParameters(optimizer, vectors, SoloGroup(), names, rejects)  # type: ignore[arg-type]
    return parameters, optimizer, dense, vectors


def test_the_learning_rate_is_sent_and_frozen_parameters_are_not() -> None:
    parameters, optimizer, dense, vectors = served(lr=0.0, frozen=True)
    optimizer.param_groups[0]["lr"] = 0.25
    parameters[0].grad = torch.tensor([1.0, 2.0])
    dense.push()
    assert vectors.pushed[0][0].tolist() == [1.0, 2.0]
    assert vectors.pushed[0][1] == 0.25
    assert parameters[0].grad is None


def test_a_group_that_changes_is_refused() -> None:
    parameters, optimizer, dense, _ = served(betas=(0.9, 0.99))
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.param_groups[0]["betas"] = (0.8, 0.99)
    with pytest.raises(RuntimeError, match=r"betas of group 0 was \(0.9, 0.99\).*cycle_momentum=False"):
        dense.push()
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(RuntimeError, match="had 1 groups of parameters when it was distributed, and has 2"):
        dense.push()


def test_parameters_that_the_script_changes_are_refused_and_loaded_ones_go_to_the_servers() -> None:
    parameters, _, dense, vectors = served()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with torch.no_grad():
        parameters[1].clamp_(0.25, 0.5)
    with pytest.raises(RuntimeError, match=r"parameter 1 was changed by other means.*fleet\.load.*dense=allreduce"):
        dense.push()
    dense.load(SoloGroup())
    assert vectors.values[0].tolist() == [1.0, 1.0, 0.5, 0.5, 0.5]
    dense.push()
    assert vectors.pushed[0][0].tolist() == [1.0] * 5


def test_a_parameter_without_a_gradient_is_refused_where_zeros_would_move_it() -> None:
    parameters, _, dense, _ = served()
    parameters[0].grad = torch.ones(2)
    with pytest.raises(RuntimeError, match=r"parameter 1, in group 0, has no gradient.*requires_grad_\(False\)"):
        dense.push()
    dense.push(empty=True)  # a batch without samples has no gradients at all
    parameters, _, dense, vectors = served(torch.optim.SGD, lr=0.1)
    parameters[0].grad = torch.ones(2)
    dense.push()
    assert vectors.pushed[0][0].tolist() == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_refused_by_the_parameters_name(broken: float) -> None:
    for rejects in (True, False):
        parameters, _, dense, vectors = served(torch.optim.SGD, rejects, lr=0.1)
        parameters[0].grad, parameters[1].grad = torch.full((2,), 3e38), torch.ones(3)
        dense.push()  # large, and finite
        vectors.pushed.clear()
        parameters[0].grad, parameters[1].grad = torch.ones(2), torch.tensor([1.0, broken, 1.0])
        if rejects:
            with pytest.raises(FloatingPointError, match=r"gradient of parameter 1 is not finite.*not_finite=count"):
                dense.push()
        else:
            dense.push()  # servers count it
        assert bool(vectors.pushed) is not rejects
