"""Things that scripts do wrong, or do in unusual ways: `misuse.py NAME`."""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import argosy


def parts(fleet, batch_size=4, samples=40):
    model = nn.Linear(3, 1)
    data = TensorDataset(torch.ones(samples, 3), torch.ones(samples, 1))
    return fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=batch_size))


def skip_a_batch(fleet):
    model, _, loader = parts(fleet)
    for step, (x, y) in enumerate(loader):
        if step == 2 and fleet.rank == 1:
            continue
        mse_loss(model(x), y).backward()


def two_loaders(fleet):
    model, _, loader = parts(fleet, batch_size=10)
    other = fleet.distribute(DataLoader(TensorDataset(torch.ones(25, 3)), batch_size=5))
    for (x, y), (z,) in zip(loader, other, strict=False):
        (mse_loss(model(x), y) + model(z).mean()).backward()


def trained_alone(fleet):
    """Replicas meet every 4 steps: what is each worker's own stays its own, and what is the job's becomes one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    body = torch.optim.SGD(model[0].parameters(), lr=0.1)
    head = torch.optim.AdamW(model[1].parameters(), lr=0.1)
    data = TensorDataset(torch.randn(33, 3) * (1 + 9 * fleet.rank), torch.randn(33, 1))
    model, body, head, loader = fleet.distribute(model, body, head, DataLoader(data, batch_size=4))
    for epoch in range(2):
        for step, (x, y) in enumerate(loader):
            body.zero_grad()
            head.zero_grad()
            mse_loss(model(x), y).backward()
            optimizers = [head, body] if epoch else [body, head]
            for optimizer in optimizers if step % 2 else optimizers[:1]:
                optimizer.step()
        assert alike(fleet, model), "after a loop, with optimizers in any order, one of them not in each step"
    other = nn.Linear(3, 1)
    other, optimizer = fleet.distribute(other, torch.optim.SGD(other.parameters(), lr=0.001))
    for x, y in loader:  # in its last step rank 1 has no sample
        fleet.step(x, y, mse_loss, clip_norm=0.01)
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in other.parameters() if p.grad is not None]))
        assert abs(norm - 0.01) < 1e-5 or not len(x), norm
    for x, y in loader:
        fleet.step(x, y, mse_loss)
        break
    assert not alike(fleet, other)
    fleet.forward(x)
    assert alike(fleet, other)


def alike(fleet, model):
    numbers = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    one, other = fleet.group.all_gather(numbers)
    return torch.equal(one, other)


def no_sync_around_a_step(fleet):
    parts(fleet)
    with fleet.no_sync():
        fleet.step(torch.ones(2, 3), torch.ones(2, 1), mse_loss)


def no_sync_and_accumulate(fleet):
    model, _, loader = parts(fleet)
    for x, y in loader:
        with fleet.no_sync():
            mse_loss(model(x), y).backward()


def load_a_teacher(fleet):
    """What is kept of a model stays when another one is loaded, and begins anew with its own."""
    model, _, loader = parts(fleet)
    teacher = nn.Linear(3, 1)
    fleet.save("teacher", teacher)
    fleet.save("model", model)
    for x, y in loader:
        fleet.step(x, y, mse_loss)

    def average():
        with fleet.averaged():
            return model.weight.detach().clone()

    before = average()
    fleet.load("teacher", teacher)
    assert torch.equal(average(), before)
    fleet.load("model", model)
    assert torch.equal(average(), model.weight)
    assert not torch.equal(before, model.weight)


def distribute_twice(fleet):
    model, _, _ = parts(fleet)
    fleet.distribute(model)


def other_shapes(fleet):
    fleet.distribute(nn.Linear(3, 1 + fleet.rank))


def other_tables(fleet):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = argosy.Embedding(4, optimizer=argosy.ps.Adagrad(lr=0.1))
            self.users = argosy.Embedding(4, name="people", optimizer=argosy.ps.SGD(lr=0.1 * (1 + fleet.rank)))

    fleet.distribute(Net())


def other_data(fleet):
    parts(fleet, samples=40 + fleet.rank)


def sparse(fleet):
    model = fleet.distribute(nn.Embedding(10, 3, sparse=True))
    model(torch.tensor([1])).sum().backward()


def join_again(fleet):
    fleet.close()
    with argosy.init() as again:
        assert again.mean(float(again.rank)) == 0.5
    with argosy.init() as third:
        third.print("joined three times")


def weights_after_joining_again(fleet):
    """Three samples on two workers: a model that was in the job before is weighted by samples all the same."""
    model = nn.Linear(1, 1, bias=False)
    for again in range(2):
        job = argosy.init("batch=global") if again else fleet
        fleet.distribute(model) if not again else job.distribute(model)
        loader = job.distribute(DataLoader(TensorDataset(torch.tensor([[1.0], [2.0], [6.0]])), batch_size=3))
        for (x,) in loader:
            model.weight.grad = None
            model(x).mean().backward()
            assert model.weight.grad.item() == 3.0, model.weight.grad
        job.close()


def backward_twice_with_buffers(fleet):
    model = fleet.distribute(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)))
    out = model(torch.randn(8, 3))
    out[:, 0].mean().backward(retain_graph=True)
    out[:, 1].mean().backward()


def held_iterator(fleet):
    """A batch of another loader now and then, from an iterator that is never finished."""
    model, _optimizer, loader = parts(fleet, batch_size=4, samples=18)
    held = iter(fleet.distribute(DataLoader(TensorDataset(torch.ones(64, 3)), batch_size=16)))
    for step, (x, y) in enumerate(loader):
        if step == 1:
            with torch.no_grad():
                model(next(held)[0])
        fleet.step(x, y, mse_loss)
        assert fleet.mean(1.0) == 1.0


def two_optimizers(fleet):
    one, two = nn.Linear(3, 3), nn.Linear(3, 1)
    _, first = fleet.distribute(one, torch.optim.SGD(one.parameters(), lr=0.1))
    _, second = fleet.distribute(two, torch.optim.SGD(two.parameters(), lr=0.1))
    for (x,) in fleet.distribute(DataLoader(TensorDataset(torch.ones(16, 3)), batch_size=2)):
        two(one(x)).mean().backward()
        first.step()
        second.step()


def leave(fleet):
    """Threads of Gloo that outlive the group may abort the process while the interpreter ends."""
    _model, _optimizer, loader = parts(fleet)
    for x, y in loader:
        fleet.step(x, y, mse_loss)
    fleet.close()
    threads = [Path(f"/proc/self/task/{task}/comm").read_text() for task in os.listdir("/proc/self/task")]
    assert not [name for name in threads if "gloo" in name], threads


def change_folder(fleet):
    os.chdir("/")
    fleet.save(fleet.run_folder / "net", parts(fleet)[0])


def reentrant_checkpoint(fleet):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, x):
            return checkpoint(self.last, self.first(x), use_reentrant=True)

    torch.manual_seed(0)
    model = Net()
    plain = [p.detach().clone() for p in model.parameters()]
    fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.full((2, 3), 1.0 + fleet.rank), torch.ones(2, 1)
    loss = fleet.step(x, y, mse_loss)
    with torch.no_grad():
        for value, parameter in zip(plain, model.parameters(), strict=True):
            both = parameter.grad.clone()
            fleet_mean = fleet.mean(both)
            assert torch.equal(both, fleet_mean)
            torch.testing.assert_close(parameter, value - 0.1 * both)
    assert loss > 0


fleet = argosy.init()
globals()[sys.argv[1]](fleet)
