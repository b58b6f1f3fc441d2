"""The moving average of parameters: what it is, when it is in the model, and that it comes back."""

import copy

import pytest
import torch
from torch import nn

from argosy.optim import Average


def net_with_statistics() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def train(net: nn.Module, sgd: torch.optim.Optimizer, steps: int, seed: int = 0) -> None:
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        sgd.zero_grad()
        net(torch.randn(8, 3, generator=random)).square().mean().backward()
        sgd.step()


def test_it_is_the_moving_average_of_parameters_and_running_statistics() -> None:
    net = net_with_statistics()
    expected = {name: value.double().clone() for name, value in net.state_dict().items()}
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    average = Average(net, 0.8).attach(sgd)
    for step in range(60):
        train(net, sgd, 1, seed=step)
        decay = min(0.8, (1 + step) / (10 + step))
        for name, value in net.state_dict().items():
            expected[name] = decay * expected[name] + (1 - decay) * value.double()
    own = {name: value.clone() for name, value in net.state_dict().items()}
    with average.applied():
        for name, value in net.state_dict().items():
            if "num_batches" in name:
                assert value == own[name]
            else:
                torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)
    assert all(torch.equal(value, own[name]) for name, value in net.state_dict().items())


def test_parameters_come_back_after_an_error_too() -> None:
    net = net_with_statistics()
    average = Average(net, 0.9)
    with torch.no_grad():
        net[0].weight.add_(1)
    own = net[0].weight.detach().clone()
    address = net[0].weight.data_ptr()

    def fail() -> None:
        with average.applied():
            assert not torch.equal(net[0].weight, own)
            raise OSError("evaluation fails")

    with pytest.raises(OSError, match="evaluation fails"):
        fail()
    assert torch.equal(net[0].weight, own)
    assert net[0].weight.data_ptr() == address, "an optimizer, or a bucket, may hold on to the memory"
    with average.applied():
        pass


def test_training_on_the_average_is_refused() -> None:
    net = net_with_statistics()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    average = Average(net, 0.9).attach(sgd)
    with average.applied():
        with pytest.raises(RuntimeError, match="cannot be trained"):
            train(net, sgd, 1)
        with pytest.raises(RuntimeError, match="does not nest"), average.applied():
            pass


def test_steps_that_only_gather_gradients_are_not_counted() -> None:
    net = net_with_statistics()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    average = Average(net, 0.9).attach(sgd)
    sgd.step()
    assert average.updates == 0
    train(net, sgd, 2)
    assert average.updates == 2
    average.close()
    train(net, sgd, 1)
    assert average.updates == 2


def test_constants_that_are_not_finite_stay() -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
    average = Average(net, 0.9)
    average.update()
    with average.applied():
        assert torch.equal(net.mask, torch.full((2, 2), float("-inf")).triu(1))


def test_buffers_that_a_module_assigns_are_followed() -> None:
    net = nn.Linear(1, 1, bias=False)
    net.register_buffer("mean", torch.zeros(1))
    average = Average(net, 0.9)
    for _ in range(100):
        net.mean = torch.ones(1)
        average.update()
    net.mean = torch.full((1,), 5.0)
    with average.applied():
        assert float(net.mean) == pytest.approx(1, abs=1e-3)
    assert float(net.mean) == 5


def test_an_average_of_16_bit_parameters_does_not_stand_still() -> None:
    net = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.ones_(net.weight)
    average = Average(net, 0.999)
    average.updates = 100_000
    nn.init.constant_(net.weight, 2)
    for _ in range(1000):
        average.update()
    with average.applied():
        assert float(net.weight.detach()) == pytest.approx(2 - 0.999**1000, abs=0.01)


def test_a_restored_average_goes_on_as_before() -> None:
    net = net_with_statistics()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    average = Average(net, 0.9).attach(sgd)
    train(net, sgd, 5)
    other = copy.deepcopy(net)
    again = Average(other, 0.9)
    again.load_state_dict(copy.deepcopy(average.state_dict()))
    for each in (average, again):
        each.update()
    with average.applied(), again.applied():
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_an_average_of_another_model_is_refused() -> None:
    average = Average(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="another model: bias"):
        average.load_state_dict(Average(nn.Linear(2, 2, bias=False)).state_dict())
    with pytest.raises(ValueError, match=r"weight has the shape \(2, 3\) there and \(2, 2\) here"):
        average.load_state_dict(Average(nn.Linear(3, 2)).state_dict())
    with pytest.raises(ValueError, match=r"^decay=1\.5"):
        Average(nn.Linear(2, 2), 1.5)
