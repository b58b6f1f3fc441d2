"""Tensor parallelism in real processes: what one process computes, with parameters that stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from divided import joined
from ranks import Place, run
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from argosy.parallel.tensor.apply import TensorParallel, tensor_parallel
from argosy.parallel.tensor.config import TensorConfig
from argosy.parallel.tensor.place import fsdp_placement

DEADLINE_SECONDS = 110
STEPS = 20

pytestmark = pytest.mark.timeout(120)


def tokens() -> list[tuple[Tensor, Tensor]]:
    text = torch.randint(0, 64, (2, 4, 17), generator=torch.Generator().manual_seed(1))
    return [(batch[:, :-1], batch[:, 1:]) for batch in text]


def vectors(*shape: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(*shape, generator=generator), torch.randint(0, 10, shape[:1], generator=generator))
        for _ in range(2)
    ]


def language_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.size(-1)), y.reshape(-1))


Case = tuple[Callable[[], nn.Module], list[tuple[Tensor, Tensor]], Callable[[Any, Tensor], Tensor]]


def cases() -> dict[str, Case]:
    class_loss = nn.CrossEntropyLoss()
    return {
        "gpt": (lambda: models.Gpt(layers=3), tokens(), language_loss),
        "gpt written out": (lambda: models.Gpt(tied=False, written_out=True), tokens(), language_loss),
        "encoder": (models.Encoder, vectors(4, 8, 32), class_loss),
        "encoder, norm first": (lambda: models.Encoder(norm_first=True), vectors(4, 8, 32), class_loss),
        "mlp": (models.mlp, vectors(8, 32), class_loss),
    }


def made(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def train(model: nn.Module, case: Case, divided: TensorParallel | None = None) -> list[float]:
    """Losses of a script as users write it, or in whole steps."""
    _, batches, loss_fn = case
    # A key's bias has no effect, and so a gradient of rounding errors: with torch's epsilon AdamW makes steps of them.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    losses = []
    for step in range(STEPS):
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        with divided.whole_step() if divided is not None else nullcontext():
            loss = loss_fn(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in model.named_parameters(remove_duplicate=False)
    }


def check_same(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert list(got) == list(wanted)
    for name, each in got.items():
        torch.testing.assert_close(
            each, wanted[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def _trains(place: Place, name: str, settings: dict[str, Any]) -> None:
    mesh, case = joined(place), cases()[name]
    alone = made(case[0])
    before = whole(alone)
    for whole_steps in (True, False):
        model = made(case[0], seed=3 if place.rank == 0 else 9)  # they begin as the first rank's
        alone = made(case[0])
        divided = tensor_parallel(model, mesh, TensorConfig(**settings))
        assert all(isinstance(each, DTensor) for each in model.parameters())
        assert sum(each.to_local().numel() for each in model.parameters()) < 0.7 * sum(
            each.numel() for each in alone.parameters()
        )
        check_same(whole(model), before, 0)
        wanted, got = train(alone, case), train(model, case, divided if whole_steps else None)
        assert wanted[-1] < 0.6 * wanted[0]
        torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=1e-4, atol=0)
        check_same(whole(model), whole(alone), 1e-4)
        x, _ = case[1][0]
        model.eval(), alone.eval()
        with torch.no_grad():  # where torch's encoder would go past its modules
            output = model(x)
        assert type(output) is Tensor
        torch.testing.assert_close(output, alone(x), rtol=1e-3, atol=1e-3)
        divided.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("name", cases())
def test_training_gives_what_one_process_gives(name: str) -> None:
    run(_trains, 2, name, {}, deadline_seconds=DEADLINE_SECONDS)


@pytest.mark.parametrize("name", ["gpt", "encoder, norm first"])
def test_training_divided_along_the_sequence_gives_the_same(name: str) -> None:
    run(_trains, 2, name, {"sequence_parallel": True}, deadline_seconds=DEADLINE_SECONDS)


def _trains_sharded(place: Place) -> None:
    """Along another axis, `fully_shard` divides what is left of each parameter."""
    mesh, case = joined(place, 2, 2, names=("shard", "tensor")), cases()["gpt"]
    alone, model = made(case[0]), made(case[0])
    divided = tensor_parallel(model, mesh["tensor"], TensorConfig())
    for block in model.h:
        fully_shard(block, mesh=mesh["shard"], shard_placement_fn=fsdp_placement)
    fully_shard(model, mesh=mesh["shard"], shard_placement_fn=fsdp_placement)
    check_same(whole(model), whole(alone), 0)
    wanted, got = train(alone, case), train(model, case, divided)  # both shards see the same samples
    torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=1e-4, atol=0)
    check_same(whole(model), whole(alone), 1e-4)
    dist.destroy_process_group()


def test_parameters_are_divided_further_by_fully_shard() -> None:
    run(_trains_sharded, 4, deadline_seconds=DEADLINE_SECONDS)
