"""Replicas that train alone and meet every k steps, against a plain simulation of the same in one process."""

from __future__ import annotations

import copy
import itertools
import math
from pathlib import Path
from typing import Any

import kept_states
import pytest
import straggler
import torch
from ranks import Place, run
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from argosy.data.batches import BatchConfig, share_bounds
from argosy.data.cursor import Cursor
from argosy.data.loader import Loader
from argosy.parallel.local import LocalReplicas, Round
from argosy.parallel.local_config import LocalConfig

SAMPLES, BATCH = 57, 8  # 8 steps, and in the last a single sample: all workers but one have none
INNER: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.05}, "AdamW": {"lr": 0.01, "weight_decay": 0.1}}


def data() -> TensorDataset:
    x = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, (x.sum(1, keepdim=True) > 0).double())


def net(kind: str = "plain", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    # Three values of each channel in a sample: a batch of one can be normalised.
    norm: list[nn.Module] = [nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2), nn.Flatten()] if kind == "norm" else []
    model = nn.Sequential(nn.Linear(5, 6), *norm, nn.Tanh(), nn.Linear(6, 1))
    return model.double() if kind != "small" else model


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    kind = next(model.parameters()).dtype
    return nn.functional.binary_cross_entropy_with_logits(model(x.to(kind)), y.to(kind))


def bits(model: nn.Module) -> bytes:
    return b"".join(value.numpy().tobytes() for value in model.state_dict().values())


def numbers(model: nn.Module) -> list[float]:
    """Parameters and running statistics."""
    values = [value for value in model.state_dict().values() if value.is_floating_point()]
    return [number for value in values for number in value.double().flatten().tolist()]


class Worker:
    """A rank with its replica."""

    def __init__(self, place: Place, config: dict[str, Any], kind: str = "plain", inner: str = "SGD") -> None:
        self.group, self.cursor = place.join(f"{config} {kind} {inner}"), Cursor()
        self.model = net(kind, seed=place.rank)
        self.rounds: list[Round] = []
        self.optimizer = getattr(torch.optim, inner)(self.model.parameters(), **INNER[inner])
        settings = LocalConfig(**config)
        self.replicas = LocalReplicas(self.model, self.group, self.cursor, settings, told=self.rounds.append)
        assert self.replicas.attach(self.optimizer)
        script = DataLoader(data(), BATCH, shuffle=True)
        self.loader = Loader(script, BatchConfig(batch="global"), place.size, place.rank, self.cursor)

    def epoch(self, report: bool = True) -> list[bytes]:
        """Train; the replica's bits after each step, as far as the script sees it inside the loop."""
        seen = []
        for x, y in self.loader:
            self.optimizer.zero_grad()
            loss = loss_of(self.model, x, y)
            if report:
                self.cursor.loss = float(loss.detach())
            loss.backward()
            self.optimizer.step()
            seen.append(bits(self.model))
        return seen

    def close(self) -> None:
        self.replicas.close()
        self.group.close()


class Simulation:
    """The same in one process and as plainly as can be: a list of replicas, and torch's own SGD for the outer step."""

    def __init__(
        self, workers: int, sync: str, inner: str, kind: str = "plain", lr: float = 0.7, momentum: float = 0.9
    ) -> None:
        way, period = sync.split(":")
        self.diloco, self.period, self.inner = way == "diloco", int(period), inner
        self.start = net(kind)
        self.outer = torch.optim.SGD(self.start.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
        self.losses: list[float] = []
        self.next_epoch = 0
        self.set_workers(workers)

    def set_workers(self, workers: int) -> None:
        self.replicas = [copy.deepcopy(self.start) for _ in range(workers)]
        self.optimizers = [getattr(torch.optim, self.inner)(r.parameters(), **INNER[self.inner]) for r in self.replicas]
        self.samples, self.loss_sum, self.steps = [0] * workers, 0.0, 0

    def epoch(self, stop: int | None = None) -> None:
        loader = Loader(DataLoader(data(), BATCH, shuffle=True), BatchConfig(batch="global"), 1, 0, Cursor())
        loader.epoch = self.next_epoch
        self.next_epoch += 1
        for x, y in itertools.islice(loader, stop):
            for rank, (replica, optimizer) in enumerate(zip(self.replicas, self.optimizers, strict=True)):
                begin, end = share_bounds(len(x), len(self.replicas), rank)
                if begin < end:
                    optimizer.zero_grad()
                    loss = loss_of(replica, x[begin:end], y[begin:end])
                    loss.backward()
                    optimizer.step()
                    self.samples[rank] += end - begin
                    self.loss_sum += float(loss.detach()) * (end - begin)
            self.steps += 1
            if self.steps == self.period:
                self.meet()
        if self.steps:
            self.meet()

    def meet(self) -> None:
        total = sum(self.samples)
        with torch.no_grad():
            for start, *mine in zip(self.start.parameters(), *(r.parameters() for r in self.replicas), strict=True):
                mean = sum(p * n / total for p, n in zip(mine, self.samples, strict=True))
                start.grad = start - mean
                if not self.diloco:
                    start.copy_(mean)
            if self.diloco:
                self.outer.step()
            for start, *mine in zip(self.start.buffers(), *(r.buffers() for r in self.replicas), strict=True):
                if start.is_floating_point():
                    start.copy_(sum(b * n / total for b, n in zip(mine, self.samples, strict=True)))
            for replica in self.replicas:
                replica.load_state_dict(self.start.state_dict())
        self.losses.append(self.loss_sum / total)
        self.samples, self.loss_sum, self.steps = [0] * len(self.replicas), 0.0, 0


def apart(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def trained(place: Place, config: dict[str, Any], kind: str, inner: str, epochs: int) -> dict[str, Any]:
    worker = Worker(place, config, kind, inner)
    steps = [worker.epoch() for _ in range(epochs)]
    told = {"steps": steps, "end": bits(worker.model), "numbers": numbers(worker.model), "rounds": worker.rounds}
    told["sent"] = worker.replicas.bytes_sent
    worker.close()
    return told


THREE: dict[str, tuple[dict[str, Any], str, str, int]] = {
    "every step": ({"sync": "local:1"}, "plain", "SGD", 1),
    "local": ({"sync": "local:3"}, "norm", "AdamW", 2),
    "diloco": ({"sync": "diloco:3"}, "norm", "AdamW", 2),
    "gentle diloco": ({"sync": "diloco:5", "outer_lr": 0.4, "outer_momentum": 0.5}, "plain", "SGD", 2),
}
TWO: dict[str, tuple[dict[str, Any], str, str, int]] = {
    "local": ({"sync": "local:3"}, "norm", "SGD", 2),
    "adaptive": ({"sync": "adaptive:4"}, "plain", "AdamW", 25),
}
QUANTISED: dict[str, tuple[dict[str, Any], str, str, int]] = {
    "int4": ({"sync": "diloco:2:int4"}, "small", "AdamW", 12),
    "whole": ({"sync": "diloco:2"}, "small", "AdamW", 12),
}


def all_trained(place: Place, runs: dict[str, tuple[dict[str, Any], str, str, int]]) -> dict[str, dict[str, Any]]:
    """Several in one start of processes, which takes longer than all that they do."""
    return {name: trained(place, *options) for name, options in runs.items()}


@pytest.fixture(scope="module")
def three() -> list[dict[str, dict[str, Any]]]:
    """By rank, by name of the run, what a worker of three tells."""
    return run(all_trained, 3, THREE)


@pytest.fixture(scope="module")
def two() -> list[dict[str, dict[str, Any]]]:
    return run(all_trained, 2, TWO)


Runs = list[dict[str, dict[str, Any]]]


def test_meeting_every_step_is_synchronous_training(three: Runs) -> None:
    """With plain SGD the mean of the parameters is a step along the mean of the gradients."""
    alone = net()
    optimizer = torch.optim.SGD(alone.parameters(), **INNER["SGD"])
    for x, y in Loader(DataLoader(data(), BATCH, shuffle=True), BatchConfig(), 1, 0, Cursor()):
        optimizer.zero_grad()
        loss_of(alone, x, y).backward()
        optimizer.step()
    for told in three:
        assert apart(told["every step"]["numbers"], numbers(alone)) < 1e-12


@pytest.mark.parametrize("name", ["local", "diloco", "gentle diloco"])
def test_rounds_compute_what_the_simulation_does(three: Runs, name: str) -> None:
    config, kind, inner, epochs = THREE[name]
    outer = {name.removeprefix("outer_"): value for name, value in config.items() if name != "sync"}
    reference = Simulation(3, config["sync"], inner, kind, **outer)
    for _ in range(epochs):
        reference.epoch()
    ranks = [told[name] for told in three]
    assert apart(ranks[0]["numbers"], numbers(reference.start)) < 1e-12
    assert len({told["end"] for told in ranks}) == 1
    for told in ranks:
        assert apart([r.loss for r in told["rounds"]], reference.losses) < 1e-12
        assert sum(r.samples for r in told["rounds"]) == epochs * SAMPLES


def test_replicas_are_the_same_after_rounds_and_only_then(two: Runs) -> None:
    ranks = [told["local"] for told in two]
    for epoch in range(2):
        same = [len(set(step)) == 1 for step in zip(*(told["steps"][epoch] for told in ranks), strict=True)]
        assert same == [False, False, True, False, False, True, False, False], "batch-norm statistics included"
    assert len({told["end"] for told in ranks}) == 1, "the end of an epoch is a round too"
    assert [r.steps for r in ranks[1]["rounds"]] == [3, 3, 2] * 2
    averaged_bytes = 8 * len(ranks[0]["numbers"])
    assert 6 * averaged_bytes < ranks[0]["sent"] < 6 * (averaged_bytes + 200), "and little beside what is averaged"


def test_an_adaptive_period_is_the_same_everywhere_and_follows_the_rule(two: Runs) -> None:
    rounds: list[Round] = two[0]["adaptive"]["rounds"]
    shown = [(r.number, r.steps, r.loss, r.next_period) for r in rounds]
    assert shown == [(r.number, r.steps, r.loss, r.next_period) for r in two[1]["adaptive"]["rounds"]]
    for this, following in itertools.pairwise(rounds):
        assert this.loss is not None
        assert rounds[0].loss is not None
        assert this.next_period == min(4, math.ceil(4 * math.sqrt(this.loss / rounds[0].loss)))
        assert following.steps <= this.next_period
    assert {4, 3} <= {r.next_period for r in rounds}


def test_quantised_differences_are_fewer_bytes_and_the_same_everywhere() -> None:
    ranks = run(all_trained, 2, QUANTISED)
    quantised, plain = ranks[0]["int4"], ranks[0]["whole"]
    assert len({told["int4"]["end"] for told in ranks}) == 1
    first, last = quantised["rounds"][0].loss, quantised["rounds"][-1].loss
    assert last < 0.7 * first
    assert abs(last - plain["rounds"][-1].loss) < 0.1
    assert quantised["sent"] < plain["sent"]


# Checkpoints.


def some_steps(worker: Worker, count: int) -> None:
    for step, (x, y) in enumerate(worker.loader):
        worker.optimizer.zero_grad()
        loss_of(worker.model, x, y).backward()
        worker.optimizer.step()
        if step + 1 == count:
            break


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return torch.allclose(one, other, rtol=1e-6) if isinstance(one, Tensor) else one == other


def save(place: Place, folder: Path, sync: str, kind: str) -> dict[str, Any]:
    worker = Worker(place, {"sync": sync}, kind)
    worker.epoch()
    some_steps(worker, 4)
    before = bits(worker.model)
    state = worker.replicas.state_dict(worker.group)
    kept_states.write(folder, {"model": worker.model.state_dict(), "replicas": state}, worker.group)
    worker.close()
    return {"before": before, "after": bits(worker.model)}


def resume(place: Place, folder: Path, sync: str, kind: str) -> dict[str, Any]:
    worker = Worker(place, {"sync": sync}, kind)
    states = kept_states.read(folder, worker.group)
    some_steps(worker, 2)  # what is loaded takes the place of whatever was there
    worker.model.load_state_dict(states["model"])
    worker.replicas.load_state_dict(states["replicas"], worker.group)
    told: dict[str, Any] = {"loaded": bits(worker.model)}
    again = worker.replicas.state_dict(worker.group)["outer"]
    told["kept"] = same(again, states["replicas"]["outer"])
    worker.loader.epoch = 1
    worker.epoch()
    told |= {"numbers": numbers(worker.model), "end": bits(worker.model), "rounds": worker.replicas.rounds}
    worker.close()
    other = Worker(place, {"sync": "local:3"})
    with pytest.warns(UserWarning, match="made under sync=diloco and the job runs sync=local"):
        other.replicas.load_state_dict(states["replicas"], other.group)
    other.close()
    return told


def saved_and_resumed(folder: Path, sync: str, kind: str) -> list[dict[str, Any]]:
    """By two workers, then by three."""
    saved = run(save, 2, folder, sync, kind)
    assert len({told["before"] for told in saved}) == 2
    assert len({told["after"] for told in saved}) == 1, "saving makes the replicas one"
    resumed = run(resume, 3, folder, sync, kind)
    assert {told["loaded"] for told in resumed} == {saved[0]["after"]}
    assert all(told["kept"] for told in resumed)
    assert {told["rounds"] for told in resumed} == {3 + 2 + 3}
    assert len({told["end"] for told in resumed}) == 1
    return resumed


def test_training_continues_on_another_number_of_workers(tmp_path: Path) -> None:
    """The outer momentum goes on; the reference changes its number of replicas at the same place."""
    resumed = saved_and_resumed(tmp_path / "net", "diloco:3", "plain")
    reference = Simulation(2, "diloco:3", "SGD")
    reference.epoch()
    reference.epoch(stop=4)
    reference.set_workers(3)
    reference.next_epoch = 1
    reference.epoch()
    assert apart(resumed[0]["numbers"], numbers(reference.start)) < 1e-12


def test_what_quantising_still_owes_is_kept(tmp_path: Path) -> None:
    saved_and_resumed(tmp_path / "net", "diloco:3:int4", "small")


# What goes wrong, and who is slow.


def misused(place: Place) -> list[str]:
    said = []
    silent = Worker(place, {"sync": "adaptive:2"})
    with pytest.raises(RuntimeError) as caught:
        silent.epoch(report=False)
    said.append(str(caught.value))
    silent.close()

    unequal = Worker(place, {"sync": "local:100"})
    for _ in range(1 + place.rank):
        unequal.optimizer.step()
    with pytest.raises(RuntimeError) as caught:
        unequal.replicas.synchronise()
    said.append(str(caught.value))
    unequal.close()

    group = place.join("no optimizer")
    model = net("small")
    LocalReplicas(model, group, Cursor(), LocalConfig(sync="local:2"))
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 5)).sum().backward()
    said.append(str(caught.value))
    group.close()

    replaced = Worker(place, {"sync": "local:1"})
    name, layer = next((name, part) for name, part in replaced.model.named_children() if isinstance(part, nn.Linear))
    setattr(replaced.model, name, nn.Linear(layer.in_features, layer.out_features))
    with pytest.raises(RuntimeError) as caught:
        replaced.optimizer.step()
    said.append(str(caught.value))
    replaced.close()
    return said


def test_misuse_is_said_with_its_remedy() -> None:
    for rank, (silent, unequal, no_optimizer, replaced) in enumerate(run(misused, 2)):
        assert "fleet.report(loss)" in silent
        assert f"rank {rank} is {rank + 1} steps after round 0" in unequal
        assert "give it to fleet.distribute too" in no_optimizer
        assert "was added or replaced after the model was distributed" in replaced


def slow_worker(place: Place, steps: int) -> straggler.Trained:
    group = place.join()
    told = straggler.train(group, balance=True, steps=steps)
    group.close()
    return told


def test_real_workers_agree_on_shares_that_follow_their_speed() -> None:
    """By counting, not by the clock: how much faster it makes a job is a benchmark's to say."""
    ranks = run(slow_worker, 2, 24)
    assert sorted(ranks[0].seen + ranks[1].seen) == list(range(24 * 64))
    assert ranks[0].shares == ranks[1].shares
    fast, slow = ranks[0].shares[-1]
    assert fast + slow == 64
    assert 2 < fast / slow < 4.5
    assert ranks[0].arithmetic.startswith(f"global batch 64 = {fast} + {slow} per worker (by speed)")
