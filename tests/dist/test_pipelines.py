"""Pipelines in real processes: they compute what one process computes, and waste no more time than they must."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_models import GPT, Convolutions, Masked, Slow, Waiting, gpt_batches, gpt_loss
from ranks import Place, run
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from argosy.comm.backend import register_backend
from argosy.comm.engine import EngineGroup
from argosy.config import ConfigError
from argosy.parallel.pipeline.config import PipelineConfig
from argosy.parallel.pipeline.pipeline import Pipeline
from argosy.parallel.pipeline.staged import Staged
from argosy.parallel.pipeline.uneven import UnevenPipeline

pytestmark = pytest.mark.timeout(240)
DEADLINE_SECONDS = 200
STEPS, SAMPLES, LAST = 20, 13, 5  # neither divides by the micro-batches
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


@contextmanager
def on_torch(place: Place, shape: tuple[int, ...] = (), names: tuple[str, ...] = ("pipeline",)) -> Iterator[DeviceMesh]:
    register_backend()
    dist.init_process_group(
        "argosy",
        store=dist.PrefixStore("torch", place.store),
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=60),
    )
    try:
        yield init_device_mesh("cpu", shape or (place.size,), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def alone() -> tuple[list[float], dict[str, Tensor], Tensor]:
    """What one process computes."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in gpt_batches(STEPS, SAMPLES, last=LAST):
        optimizer.zero_grad()
        loss = gpt_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        return losses, dict(model.named_parameters()), model(gpt_batches(1, 3)[0][0])


def trained(make: Callable[[nn.Module, Callable[[str], None]], Staged], rank: int) -> dict[str, Any]:
    """The same steps in a pipeline. Only the first worker has the numbers that all begin with."""
    torch.manual_seed(0 if rank == 0 else 1)
    model, lines = GPT(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    pipeline = make(model, lines.append)
    pipeline.attach(optimizer)
    losses = []
    for x, y in gpt_batches(STEPS, SAMPLES, last=LAST):
        optimizer.zero_grad()
        losses.append(float(pipeline.step(x, y, gpt_loss)))
        optimizer.step()
    held = dict(model.named_parameters())
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {id(p) for p in held.values()}
    assert set(held) == pipeline.names()
    with pytest.raises(RuntimeError, match=r"train with fleet\.step"):
        model(x)
    output = pipeline.forward(gpt_batches(1, 3)[0][0])
    return {
        "losses": losses,
        "held": {name: parameter.detach().numpy() for name, parameter in held.items()},
        "owned": sorted(pipeline.owned()),
        "output": output.numpy(),
        "lines": lines,
        "bubble": pipeline.bubble,
    }


def check(results: list[dict[str, Any]], expected: tuple[list[float], dict[str, Tensor], Tensor], copies: int) -> None:
    losses, parameters, output = expected
    seen: dict[str, list[Tensor]] = {}
    for result in results:
        assert result["losses"] == results[0]["losses"], "all know the same loss"
        assert result["losses"] == pytest.approx(losses, rel=1e-4)
        torch.testing.assert_close(torch.from_numpy(result["output"]), output, rtol=1e-3, atol=1e-4)
        for name, values in result["held"].items():
            seen.setdefault(name, []).append(torch.from_numpy(values))
    assert seen.keys() == parameters.keys()
    for name, values in seen.items():
        torch.testing.assert_close(values[0], parameters[name].detach(), rtol=1e-4, atol=1e-5)
        assert all(torch.equal(value, values[0]) for value in values), f"{name} has the same bits wherever it is"
    assert len(seen["tokens.weight"]) == copies
    owned = [name for result in results for name in result["owned"]]
    assert sorted(owned) == sorted(parameters), "each has one owner"


def on_two(place: Place) -> dict[str, Any]:
    """Everything that two workers can show, in one launch."""
    with on_torch(place) as mesh:
        told: dict[str, Any] = {
            schedule: trained(
                lambda model, show, schedule=schedule: Pipeline(model, mesh, PipelineConfig(schedule=schedule), show),
                place.rank,
            )
            for schedule in SCHEDULES
        }
        told["named"] = named_split(mesh)
        told["masked"] = arguments_and_accumulation(mesh)
        told["batch norm"] = batch_norm(mesh)
        views(mesh)
        told["few"] = fewer_samples_than_micro_batches(mesh)
        told["refused"] = refusal(mesh)
        told["bubbles"] = {schedule: idle(mesh, schedule) for schedule in ("1f1b", "zero-bubble")}
        return told


def test_two_workers_compute_what_one_computes_under_every_schedule() -> None:
    expected = alone()
    both = run(on_two, 2, deadline_seconds=DEADLINE_SECONDS)
    for schedule in SCHEDULES:
        # There and back, the first worker has both the first and the last stage.
        check([told[schedule] for told in both], expected, copies=1 if schedule == "zero-bubble" else 2)
        first, *stages, idle = both[0][schedule]["lines"]
        assert f"schedule={schedule}, 8 micro-batches (4 for each worker" in first
        assert len(stages) == (4 if schedule in ("interleaved", "zero-bubble") else 2)
        assert idle.startswith("pipeline: ")
        assert " by theory" in idle
    for told in both:
        assert told["named"] == both[0]["named"]
        assert told["refused"].startswith(
            "pipeline=2: a model is cut into 2 stages at 1 modules, and in Linear a stage can begin at no module"
        )
        for schedule, (measured, theory) in told["bubbles"].items():
            assert measured == pytest.approx(theory, abs=0.1), schedule
    assert both[0]["bubbles"]["1f1b"][1] == pytest.approx(1 / 9)
    assert both[0]["bubbles"]["zero-bubble"][1] < 0.05


def named_split(mesh: DeviceMesh) -> list[str]:
    """The user says where. The second worker never has memory for the whole model."""
    lines: list[str] = []
    torch.manual_seed(0)
    whole = GPT()
    with torch.device("cpu" if mesh.get_rank() == 0 else "meta"):
        model = GPT()
    model.load_state_dict(whole.state_dict())  # on the meta device nothing is loaded
    pipeline = Pipeline(model, mesh, PipelineConfig(split="blocks.3", micro_batches=2), lines.append)
    pipeline.build(gpt_batches(1, 4)[0][0])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name))
    assert pipeline.parts.cuts == ("blocks.3",)
    assert ("blocks.3.ln1.weight" in pipeline.names()) == (mesh.get_rank() == 1)
    return [line.partition(",")[0] for line in lines[1:]]


def arguments_and_accumulation(mesh: DeviceMesh) -> None:
    """Keywords go in and a dict comes out; gradients of two steps add up, tied ones too."""
    torch.manual_seed(0)
    model, pipelined = Masked(), Masked()
    pipelined.load_state_dict(model.state_dict())
    pipeline = Pipeline(pipelined, mesh, PipelineConfig(split="blocks.1", micro_batches=3, schedule="gpipe"), print)

    def loss_fn(output: dict[str, Tensor], y: Tensor) -> Tensor:
        return F.mse_loss(output["value"], y)

    for samples in (7, 4):
        x, y = {"x": torch.randn(samples, 8), "flag": torch.tensor(2)}, torch.randn(samples, 1)
        loss = loss_fn(model(**x), y)
        (3 * loss).backward()
        told = pipeline.step(x, y, loss_fn, scale=3)
        torch.testing.assert_close(told, loss.detach())
    for name, parameter in pipelined.named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
    output = pipeline.forward(x)
    torch.testing.assert_close(output["value"], model(**x)["value"].detach())
    assert output["flag"] == 2


def batch_norm(mesh: DeviceMesh) -> None:
    """Batch norm sees micro-batches, and a stage's buffers are its own."""
    torch.manual_seed(0)
    model, pipelined = Convolutions(), Convolutions()
    pipelined.load_state_dict(model.state_dict())
    x, y = torch.randn(8, 1, 6, 6), torch.randint(3, (8,))
    for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
        (F.cross_entropy(model(part), target) / 4).backward()
    pipeline = Pipeline(pipelined, mesh, PipelineConfig(split="2,4,5", micro_batches=4, schedule="zero-bubble"), print)
    pipeline.step(x, y, F.cross_entropy)
    for name, parameter in pipelined.named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
    for name, buffer in pipelined.named_buffers():
        if name in pipeline.names():
            torch.testing.assert_close(buffer, model.get_buffer(name))
    assert {name for name in pipeline.names() if "running" in name}
    model.eval()
    pipelined.eval()
    if mesh.get_rank() == 0:
        for name, buffer in model.named_buffers():
            if name not in pipeline.names():
                pipelined.get_buffer(name).copy_(buffer)
    torch.testing.assert_close(pipeline.forward(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def views(mesh: DeviceMesh) -> None:
    """A stage may end with a view of what it has computed."""
    torch.manual_seed(0)
    layers = (nn.Linear(8, 8), nn.Unflatten(1, (2, 4)), nn.Linear(4, 4), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 3))
    model = nn.Sequential(*layers)
    pipelined = copy.deepcopy(model)
    x, y = torch.randn(8, 8), torch.randint(3, (8,))
    F.cross_entropy(model(x), y).backward()
    pipeline = Pipeline(pipelined, mesh, PipelineConfig(split="2,4,5", micro_batches=4, schedule="zero-bubble"), print)
    pipeline.step(x, y, F.cross_entropy)
    for name, parameter in pipelined.named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


def fewer_samples_than_micro_batches(mesh: DeviceMesh) -> None:
    """A batch that does not fill the micro-batches, and one of nothing at all."""
    torch.manual_seed(0)
    model, pipelined = GPT(layers=2), GPT(layers=2)
    pipelined.load_state_dict(model.state_dict())
    pipeline = Pipeline(pipelined, mesh, PipelineConfig(micro_batches=4), print)
    (x, y) = gpt_batches(1, 3)[0]
    loss = gpt_loss(model(x), y)
    loss.backward()
    torch.testing.assert_close(pipeline.step(x, y, gpt_loss), loss.detach())
    assert float(pipeline.step(x[:0], y[:0], gpt_loss)) == 0
    for name, parameter in pipelined.named_parameters():
        torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


def refusal(mesh: DeviceMesh) -> str:
    """A model that has nothing to cut; both workers are told."""
    with pytest.raises(ConfigError) as refused:
        Pipeline(nn.Linear(2, 2), mesh, PipelineConfig(), print).step(torch.ones(4, 2), torch.ones(4, 2), F.mse_loss)
    return str(refused.value)


def idle(mesh: DeviceMesh, schedule: Any) -> tuple[float | None, float]:
    """The bubble of balanced stages whose work takes a fixed time, whatever else runs on this machine."""
    model = nn.Sequential(nn.Linear(4, 4), *(Slow(4, 0.015) for _ in range(4)))
    cuts = "3" if schedule == "1f1b" else "2,3,4"
    pipeline = Pipeline(model, mesh, PipelineConfig(schedule=schedule, micro_batches=8, split=cuts), print)
    for _ in range(6):
        pipeline.step(torch.randn(8, 4), torch.randn(8, 4), F.mse_loss)
    return pipeline.bubble


def on_four(place: Place) -> dict[str, Any]:
    """What needs four workers."""
    told: dict[str, Any] = {}
    with on_torch(place) as mesh:
        told["four stages"] = trained(
            lambda model, show: Pipeline(model, mesh, PipelineConfig(schedule="gpipe"), show), place.rank
        )
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
        told["sharded"] = [sharded(both, schedule) for schedule in ("1f1b", "interleaved")]
        with pytest.raises(ConfigError, match="schedule=zero-bubble: it computes gradients of weights apart"):
            sharded(both, "zero-bubble")
    with closing(place.join()) as group:
        for counts in ([3, 1], [1, 2, 1]):
            told[str(counts)] = trained(
                lambda model, show, counts=counts: UnevenPipeline(model, group, counts, PipelineConfig(), show),
                place.rank,
            )
        told["seconds"] = {str(counts): waiting(group, counts) for counts in ([3, 1], [2, 2])}
        told["buffers"] = uneven_batch_norm(group)
        told["refused"] = uneven_refusals(group)
        group.barrier()
    return told


def test_four_workers_compute_what_one_computes_and_stages_may_have_several() -> None:
    expected = alone()
    four = run(on_four, 4, deadline_seconds=DEADLINE_SECONDS)
    check([told["four stages"] for told in four], expected, copies=2)
    check([told["[3, 1]"] for told in four], expected, copies=4)
    check([told["[1, 2, 1]"] for told in four], expected, copies=2)
    assert "stage 0 on workers 0, 1, 2: tokens" in four[0]["[3, 1]"]["lines"][1]
    for told in four:
        # The first stage takes 3 times as long: 24 x 60 ms / 2 + 20 ms with [2,2], 24 x 20 ms + 60 ms with [3,1].
        assert told["seconds"]["[2, 2]"] > 1.1 * told["seconds"]["[3, 1]"]
        assert told["refused"] == four[0]["refused"]
    assert four[0]["buffers"] == four[1]["buffers"] == four[2]["buffers"] != four[3]["buffers"]


def sharded(both: DeviceMesh, schedule: Any) -> None:
    """Two stages, each sharded over two workers that read different samples."""
    torch.manual_seed(0)
    model, pipelined = GPT(), GPT()
    pipelined.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reader = both.get_local_rank("shard")

    def shard(pipeline: Pipeline) -> None:
        for stage in pipeline.stage_modules:
            for block in (module for module in stage.modules() if isinstance(module, type(pipelined.blocks[0]))):
                fully_shard(block, mesh=both["shard"])
            fully_shard(stage, mesh=both["shard"])

    cuts = "blocks.2" if schedule == "1f1b" else "blocks.1,blocks.2,blocks.3"
    config = PipelineConfig(schedule=schedule, split=cuts, micro_batches=4)
    pipeline = Pipeline(pipelined, both["pipeline"], config, print, built=shard)
    theirs: torch.optim.Optimizer | None = None
    for x, y in gpt_batches(3, 16):
        optimizer.zero_grad()
        loss = gpt_loss(model(x), y)
        loss.backward()
        optimizer.step()
        pipeline.build(x)
        theirs = theirs or torch.optim.SGD(pipelined.parameters(), lr=0.1)
        theirs.zero_grad()
        half = slice(8 * reader, 8 * reader + 8)
        mine = pipeline.step(x[half], y[half], gpt_loss).reshape(1)
        dist.all_reduce(mine, group=both.get_group("shard"))
        torch.testing.assert_close(mine[0] / 2, loss.detach(), rtol=1e-4, atol=1e-5)
        theirs.step()
    for name, parameter in pipelined.named_parameters():
        torch.testing.assert_close(parameter.full_tensor(), model.get_parameter(name), rtol=1e-4, atol=1e-5)


def waiting(group: EngineGroup, counts: list[int]) -> float:
    """The seconds of a step in which the first stage takes three times as long.

    Its work is waiting, as for files, since a machine may have fewer cores than there are workers.
    """
    model = nn.Sequential(Waiting(8, 0.06), Waiting(8, 0.02))
    pipeline = UnevenPipeline(model, group, counts, PipelineConfig(split="1", micro_batches=24), print)
    x, y = torch.randn(24, 8), torch.randn(24, 8)
    seconds = []
    for _ in range(4):
        group.barrier()
        begun = time.perf_counter()
        pipeline.step(x, y, F.mse_loss)
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])


def uneven_batch_norm(group: EngineGroup) -> list[float]:
    """Workers that have seen different micro-batches have the same statistics: the mean of theirs."""
    torch.manual_seed(0)
    model, x = Convolutions(), torch.randn(6, 1, 6, 6)
    means = [model[0](part).mean((0, 2, 3)) for part in x.chunk(3)]
    pipeline = UnevenPipeline(model, group, [3, 1], PipelineConfig(split="3", micro_batches=3), print)
    pipeline.step(x, torch.zeros(6, dtype=torch.long), F.cross_entropy)
    if group.rank < 3:
        torch.testing.assert_close(model[1].running_mean, 0.1 * torch.stack(means).mean(0).detach())
        assert model[1].num_batches_tracked == 1
    return [float(value) for value in model[1].running_mean]


def uneven_refusals(group: EngineGroup) -> list[str]:
    said = []
    for counts, config, devices in (
        ([2, 1], {}, None),
        ([3, 1], {"schedule": "gpipe"}, None),
        ([3, 1], {"split": "1,2"}, None),
        ([3, 1], {"micro_batches": 2}, None),
        ([3, 1], {}, ["cpu"]),
    ):
        with pytest.raises(ConfigError) as refused:
            UnevenPipeline(nn.Linear(2, 2), group, counts, PipelineConfig(**config), print, devices=devices)
        said.append(str(refused.value))
    assert "pipeline=[2,1]: expected the workers of each of two or more stages, 4 in all" in said[0]
    assert "have an order of their own" in said[1]
    assert "has 2 stages, so 1 modules begin a new one" in said[2]
    assert "say 3 or more" in said[3]
    assert "devices=cpu: expected one for each of the 2 stages" in said[4]
    return said
