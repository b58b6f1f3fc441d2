"""Models in parts that are not one plain stack: each is trained beside a copy in one process. `parts.py CASE...`"""

import copy
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import argosy

SAMPLES, BATCH = 21, 3  # two workers have two samples and one


def batches(width=8):
    numbers = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, width, generator=numbers)
    return DataLoader(TensorDataset(x, torch.randint(0, 4, (SAMPLES,), generator=numbers)), BATCH)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def compare(fleet, model, alone):
    """The whole model, as it is exported, with the copy."""
    path = fleet.run_folder / "whole.safetensors"
    fleet.export(path, model)
    if fleet.is_first:
        whole = load_file(path)
        for name, value in alone.named_parameters():
            torch.testing.assert_close(whole[name], value.detach(), atol=2e-6, rtol=1e-5, msg=name)


def train(fleet, model, loss):
    alone = copy.deepcopy(model)
    optimizer = sgd(alone)
    for x, y in batches():
        optimizer.zero_grad()
        loss(alone, alone(x), y).backward()
        optimizer.step()
    model, optimizer, loader = fleet.distribute(model, sgd(model), batches())
    for x, y in loader:
        fleet.step(x, y, lambda output, y: loss(model, output, y))
    compare(fleet, model, alone)


class Outputs(nn.Module):
    """Gives what it computes with, too."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16))
        self.head, self.scale = nn.Linear(16, 4), nn.Parameter(torch.ones(2))
        self.temperature, self.unused = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        hidden = self.body(x)
        return hidden, self.head(hidden) * self.temperature.exp()


def outputs(fleet):
    """Two outputs, one made of the other, a parameter that only the loss uses, and single numbers."""
    train(
        fleet, Outputs(), lambda model, out, y: cross_entropy(out[1], y) * model.scale.prod() + out[0].square().mean()
    )


class Rows(nn.Module):
    """Blocks that are dictionaries, and weights that are tied, of which a worker has no row."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}) for _ in range(3))
        self.head, self.one, self.other = nn.Linear(8, 4), nn.Linear(8, 1), nn.Linear(8, 1)
        self.other.weight = self.one.weight

    def forward(self, x):
        for block in self.blocks:
            x = x + block["b"](block["a"](x).tanh())
        return self.head(x) + self.one(x) + self.other(x)


def rows(fleet):
    train(fleet, Rows(), lambda _, out, y: cross_entropy(out, y))


def chained(fleet):
    """Two models, one behind the other, in a loop that is written out."""
    models = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4)]
    alone = copy.deepcopy(models)
    for pair, loader in ((alone, batches()), (models, None)):
        optimizers = [sgd(each) for each in pair]
        if loader is None:
            *_, loader = fleet.distribute(*pair, *optimizers, batches())
        for x, y in loader:
            for optimizer in optimizers:
                optimizer.zero_grad()
            cross_entropy(pair[1](pair[0](x)), y).backward()
            for optimizer in optimizers:
                optimizer.step()
    for model, other in zip(models, alone, strict=True):
        compare(fleet, model, other)


def averaged(fleet):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model, _, loader = fleet.distribute(model, sgd(model), batches())
    for x, y in loader:
        fleet.step(x, y, cross_entropy)
    before = [parameter.detach().full_tensor().clone() for parameter in model.parameters()]
    with fleet.averaged():
        assert not torch.equal(next(model.parameters()).detach().full_tensor(), before[0])
    for parameter, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter.detach().full_tensor(), was)


def assigned(fleet):
    """`p.data` is assigned in the middle, as `vector_to_parameters` does."""
    model = nn.Linear(8, 4)
    alone = copy.deepcopy(model)
    optimizer = sgd(alone)
    model, ours, loader = fleet.distribute(model, sgd(model), batches())
    for (x, y), (part, labels) in zip(batches(), loader, strict=True):
        for each in (model, alone):
            vector = nn.utils.parameters_to_vector(each.parameters()).detach().clone()
            nn.utils.vector_to_parameters(vector, each.parameters())
        optimizer.zero_grad()
        cross_entropy(alone(x), y).backward()
        optimizer.step()
        ours.zero_grad()
        cross_entropy(model(part), labels).backward()
        ours.step()
    compare(fleet, model, alone)


class Words(nn.Module):
    """Tied weights at both ends."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(16, 8)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(self.blocks(self.words(x)))


def by_word(out, y):
    return cross_entropy(out.flatten(0, 1), y.flatten())


def thawed(fleet):
    """What several workers hold is frozen at first."""
    model = Words()
    model.words.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    alone = copy.deepcopy(model)
    optimizer = sgd(alone)
    model, _ = fleet.distribute(model, torch.optim.SGD(model.parameters(), lr=0.5))
    x = torch.randint(0, 16, (8, 5), generator=torch.Generator().manual_seed(2))
    for step in range(5):
        if step == 2:
            for each in (model, alone):
                each.requires_grad_(True)
        fleet.step(x, x, by_word)
        optimizer.zero_grad()
        by_word(alone(x), x).backward()
        optimizer.step()
    held = dict(model.named_parameters())
    for name, value in alone.named_parameters():
        if name in held:
            torch.testing.assert_close(held[name].detach(), value.detach(), atol=1e-5, rtol=1e-5, msg=name)


def thawed_too_late(fleet):
    """Of a stage that was frozen as a whole, the others do not learn that it is trained."""
    model = Words()
    model.words.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    model, _ = fleet.distribute(model, sgd(model))
    x = torch.randint(0, 16, (8, 5), generator=torch.Generator().manual_seed(2))
    fleet.step(x, x, by_word, clip_norm=1.0)
    model.requires_grad_(True)
    if fleet.is_first:
        with pytest.raises(RuntimeError, match="was thawed, of a stage that was frozen as a whole"):
            fleet.step(x, x, by_word, clip_norm=1.0)


class Now(nn.Module):
    """Remembers what it saw at every second call."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        if self.calls % 2 == 0:
            self.seen += x.detach().abs().mean()
        return x


def now_and_then(fleet):
    """A stage's workers, of which one has more turns than the others, change a buffer in some of them."""
    model = Words()
    model.blocks = nn.Sequential(Now(), *model.blocks)
    model, _ = fleet.distribute(model, sgd(model))
    x = torch.randint(0, 16, (8, 5), generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        fleet.step(x, x, by_word)
    seen = dict(model.named_buffers()).get("blocks.0.seen")
    told = fleet.group.all_gather(torch.zeros(()) if seen is None else seen)
    assert told[0] == told[1] == told[2] > 0, told


def without_samples(fleet):
    model = Words().eval()
    loader = DataLoader(TensorDataset(torch.zeros(5, 3, dtype=torch.long)), batch_size=4)
    model, loader = fleet.distribute(model, loader)
    shapes = [(tuple(x.shape), tuple(fleet.forward(x).shape)) for (x,) in loader]
    assert all(out == (*x, 16) for x, out in shapes), shapes
    assert (0, 3) in [x for x, _ in shapes] or fleet.rank % 2 == 0, shapes


def two_terms(fleet):
    """Cross-entropy of divided logits, and another term of them."""

    def loss(out, y):
        return by_word(out, y) + 0.01 * out.logsumexp(-1).square().mean()

    model = Words()
    alone = copy.deepcopy(model)
    optimizer = sgd(alone)
    model, _ = fleet.distribute(model, sgd(model))
    x = torch.randint(0, 16, (8, 5), generator=torch.Generator().manual_seed(2))
    for _ in range(3):
        told = fleet.step(x, x, loss)
        optimizer.zero_grad()
        wanted = loss(alone(x), x)
        wanted.backward()
        optimizer.step()
        torch.testing.assert_close(float(told), float(wanted.detach()), atol=1e-5, rtol=1e-5)


def main():
    for case in sys.argv[1:]:
        name, _, strategy = case.partition("|")
        with argosy.init(strategy) as fleet:
            torch.manual_seed(0)
            globals()[name](fleet)


main()
