"""A checkpoint loads onto any other mesh, bit for bit, optimizer state included."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Place, run
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from argosy.checkpoint import plan, read, write
from argosy.checkpoint.checkpoints import Checkpoints
from argosy.checkpoint.errors import CheckpointError
from argosy.checkpoint.export import export
from argosy.comm.backend import register_backend
from argosy.comm.group import Group, SoloGroup

pytestmark = pytest.mark.timeout(150)


@dataclass(frozen=True)
class Layout:
    """How many ranks along each axis: pipeline stages, replicas, shards, tensor."""

    stages: int = 1
    replicas: int = 1
    shards: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return self.stages * self.replicas * self.shards * self.tensor


LAYOUTS = {
    "one": Layout(),
    "replicas 3": Layout(replicas=3),
    "shards 4": Layout(shards=4),
    "shards 8, some empty": Layout(shards=8),
    "tensor 2": Layout(tensor=2),
    "tensor 4, uneven": Layout(tensor=4),
    "shards 2 x tensor 2": Layout(shards=2, tensor=2),
    "shards 4 x tensor 2, some empty": Layout(shards=4, tensor=2),
    "replicas 2 x shards 2 x tensor 2": Layout(replicas=2, shards=2, tensor=2),
    "stages 2": Layout(stages=2),
    "stages 2 x shards 2 x tensor 2": Layout(stages=2, shards=2, tensor=2),
}


def network(scale: float) -> nn.ModuleDict:
    """Sizes that do not divide evenly. Every element has a value of its own."""
    layers: dict[str, nn.Module] = {
        "embed": nn.Embedding(7, 6),
        "up": nn.Linear(6, 10),
        "norm": nn.BatchNorm1d(10),
        "down": nn.Linear(10, 6),
        "head": nn.Linear(6, 3, bias=False),
    }
    model = nn.ModuleDict(layers)
    with torch.no_grad():
        for number, tensor in enumerate(itertools.chain(model.parameters(), model.buffers()), 1):
            values = torch.arange(tensor.numel()).view(tensor.shape) * 7 % 101 + number
            tensor.copy_(values * scale)
    return model


class Worker:
    """A rank of a layout, with its part of the network and an optimizer."""

    def __init__(self, layout: Layout, mesh: DeviceMesh | None, rank: int, scale: float, trained: bool) -> None:
        self.model = network(scale)
        if layout.stages > 1:
            inner = layout.size // layout.stages
            cut = [["embed", "up"], ["norm", "down", "head"]][rank // inner]
            for name in [name for name in self.model if name not in cut]:
                del self.model[name]
        if mesh is not None and layout.tensor > 1:
            styles = {"up": ColwiseParallel(), "down": RowwiseParallel(), "embed": RowwiseParallel()}
            parallelize_module(self.model, mesh["tensor"], {k: v for k, v in styles.items() if k in self.model})
        if mesh is not None and layout.shards > 1:
            names = ("replicas", "shards") if layout.replicas > 1 else ("shards",)
            for layer in self.model.values():
                fully_shard(layer, mesh=mesh[names])
        groups = [
            {"params": [p for n, p in self.model.named_parameters() if "bias" not in n]},
            {"params": [p for n, p in self.model.named_parameters() if "bias" in n], "lr": 0.5 if trained else 0.1},
        ]
        self.optimizer = torch.optim.Adam(groups, lr=0.25 if trained else 0.1)
        if trained:
            self._train()

    def _train(self) -> None:
        before = [p.detach().clone() for p in self.model.parameters()]
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        with torch.no_grad():  # exact values, however the elements are divided
            for parameter, value in zip(self.model.parameters(), before, strict=True):
                parameter.copy_(value)
                self.optimizer.state[parameter]["exp_avg"].copy_(value * 2)
                self.optimizer.state[parameter]["exp_avg_sq"].copy_(value * 4)

    def tensors(self) -> dict[str, Tensor]:
        found = dict(self.model.state_dict())
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name}/{key}"] = value
        return {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in found.items()}

    def placements(self) -> list[Any]:
        kinds = []
        for parameter in self.model.parameters():
            state = self.optimizer.state[parameter]
            kinds.append([getattr(t, "placements", None) for t in (parameter, state["exp_avg"], state["exp_avg_sq"])])
        return kinds


class Nothing:
    """A job whose strategy remembers nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}

    def forget(self, models: Sequence[nn.Module]) -> None:
        """There is nothing."""


def parts(worker: Worker) -> tuple[dict[str, Any], list[nn.Module]]:
    return {"model": worker.model, "optimizer": worker.optimizer}, [worker.model]


def keeper_of(group: Group, strategy: str) -> Checkpoints:
    return Checkpoints(group, lambda: group, strategy, Nothing())


def joined(place: Place, layouts: Sequence[str]) -> dict[str, tuple[Layout, DeviceMesh | None, Group | None]]:
    """The meshes and groups of some layouts; smaller ones use the first ranks."""
    register_backend()
    store = dist.PrefixStore("torch", place.store)
    dist.init_process_group("argosy", store=store, rank=place.rank, world_size=place.size)
    found: dict[str, tuple[Layout, DeviceMesh | None, Group | None]] = {}
    for name in layouts:
        layout, mesh = LAYOUTS[name], None
        inner = (layout.replicas, layout.shards, layout.tensor)
        for stage in range(layout.stages):  # all ranks make all meshes, their own or not
            ranks = torch.arange(layout.size).view(layout.stages, *inner)[stage]
            made = DeviceMesh("cpu", ranks, mesh_dim_names=("replicas", "shards", "tensor"))
            if place.rank in ranks.flatten().tolist():
                mesh = made
        group: Group | None = None
        if place.rank < layout.size:
            group = place.join(name, range(layout.size)) if layout.size > 1 else SoloGroup()
        found[name] = layout, mesh, group
    return found


def same(worker: Worker, expected: Worker) -> None:
    ours, theirs = worker.tensors(), expected.tensors()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    assert worker.placements() == expected.placements()
    assert [g["lr"] for g in worker.optimizer.param_groups] == [g["lr"] for g in expected.optimizer.param_groups]


def sources(target: str, names: list[str]) -> list[str]:
    """What is loaded onto a layout: these two always, and each of the others onto one."""
    other = names[(names.index(target) + 3) % len(names)]
    return list(dict.fromkeys(["one", "replicas 2 x shards 2 x tensor 2", other]))


def every_way(place: Place, folder: Path, names: list[str]) -> int:
    loaded = 0
    layouts = joined(place, names)
    for name, (layout, mesh, group) in layouts.items():
        if group is not None:
            worker = Worker(layout, mesh, place.rank, 1.0, trained=True)
            keeper = keeper_of(group, name)
            keeper.save(folder / name, *parts(worker), step=3)
            export(folder / f"{name}.safetensors", worker.model, group)
        dist.barrier()
    for name, (layout, mesh, group) in layouts.items():
        if group is None:
            continue
        expected = Worker(layout, mesh, place.rank, 1.0, trained=True)
        for number, saved in enumerate(sources(name, names)):
            # Half of the time the optimizer has states of its own already.
            worker = Worker(layout, mesh, place.rank, 0.0, trained=number % 2 == 1)
            assert keeper_of(group, name).load(folder / saved, *parts(worker)) == 3
            try:
                same(worker, expected)
            except AssertionError as error:
                raise AssertionError(f"{saved} -> {name}: {error}") from error
            loaded += 1
    dist.barrier()
    dist.destroy_process_group()
    return loaded


def test_layouts_load_onto_each_other(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    results = run(every_way, 8, tmp_path, list(LAYOUTS), deadline_seconds=140)
    assert results[0] == sum(len(sources(name, list(LAYOUTS))) for name in LAYOUTS)
    plain = network(1.0).state_dict()
    for name in LAYOUTS:
        exported = load_file(tmp_path / f"{name}.safetensors")
        assert exported.keys() == plain.keys()
        assert all(torch.equal(exported[key], plain[key]) for key in plain), name
    manifest = (tmp_path / "replicas 2 x shards 2 x tensor 2" / "step-00000003" / "manifest.json").read_text()
    assert '"world": 8' in manifest


def refusals(place: Place, folder: Path) -> list[str]:
    """What is said when keys are missing, left over or of another shape, and when a group differs."""
    layouts = joined(place, ["shards 2 x tensor 2"])
    layout, mesh, group = layouts["shards 2 x tensor 2"]
    assert group is not None
    worker = Worker(layout, mesh, place.rank, 1.0, trained=True)
    keeper = keeper_of(group, "")
    keeper.save(folder, *parts(worker), step=1)
    said = []

    def refused(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        wanted = {"model": model} if optimizer is None else {"optimizer": optimizer}
        with pytest.raises(CheckpointError) as caught:
            keeper.load(folder, wanted, [model])
        said.append(str(caught.value))

    more, fewer, other = network(0.0), network(0.0), network(0.0)
    if place.rank == 1:  # one rank is enough
        more["tail"] = nn.Linear(2, 2)
        other["head"] = nn.Linear(5, 3, bias=False)
    del fewer["head"]
    refused(more)
    refused(fewer)
    refused(other)
    model = network(0.0)
    refused(model, torch.optim.Adam(model.parameters()))
    refused(model, torch.optim.SGD([{"params": [p]} for p in model.parameters()]))
    dist.destroy_process_group()
    return said


def test_what_does_not_fit_is_named_on_every_rank(tmp_path: Path) -> None:
    said = run(refusals, 4, tmp_path)
    assert said == [said[0]] * 4
    missing, extra, shape, groups, kinds = said[0]
    assert missing.startswith("rank 1: ")
    assert "the checkpoint has no tail.weight, tail.bias of model" in missing
    assert "model has no head.weight, and the checkpoint does" in extra
    assert "model/head.weight has the shape [3, 6] in the checkpoint, and [3, 5] here" in shape
    assert "group 0 of the parameters differs: its parameters are in the groups 0, 1 of the checkpoint" in groups
    assert "group 0 of the parameters differs" in kinds


def apart(place: Place, folder: Path) -> list[bool]:
    """Each rank has a folder of its own, as on hosts without a shared file system; one of two is saved by a thread."""
    write._MESSAGE_BYTES = read._MESSAGE_BYTES = plan._LARGE_BYTES = 1 << 20  # as if it were a large model
    group, second = place.join("apart"), place.join("second")
    mine = folder / str(place.rank)
    keeper = Checkpoints(group, lambda: second, "", Nothing())
    model = nn.Linear(3000, 1000)
    nn.init.constant_(model.weight, 0.5)
    model.weight.data[:, 0] = torch.arange(1000)
    nn.init.ones_(model.bias)
    keeper.save(mine, {"model": model}, [model], step=1)
    keeper.save(mine, {"model": model}, [model], step=2, wait=False)
    nn.init.zeros_(model.bias)  # the copy is what counts
    total = torch.ones(1)
    group.all_reduce(total)  # training goes on meanwhile
    keeper.finish()
    same = []
    for step in (1, 2):
        other = nn.Linear(3000, 1000)
        keeper.load(mine / f"step-0000000{step}", {"model": other}, [other])
        same.append(torch.equal(other.weight, model.weight) and bool((other.bias == 1).all()))
    keeper.close()
    group.close()
    return [*same, float(total) == place.size]


def test_ranks_that_do_not_see_the_folder_take_part(tmp_path: Path) -> None:
    assert run(apart, 3, tmp_path) == [[True, True, True]] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    files = [file.stat().st_size for file in (tmp_path / "0" / "step-00000002").glob("*.safetensors")]
    assert len(files) == 3
    assert min(files) > 3_000_000
