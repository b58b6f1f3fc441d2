"""Where a model is cut, what crosses the cuts, who holds what; schedules as plain data. No other process is needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_models import GPT, Convolutions, Masked, Skipping
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from argosy.config import ConfigError
from argosy.optim.autocast import autocast_forward
from argosy.parallel.pipeline.bubble import Action, in_line, theory
from argosy.parallel.pipeline.config import PipelineConfig
from argosy.parallel.pipeline.cost import counted, measured
from argosy.parallel.pipeline.cutting import Cutting
from argosy.parallel.pipeline.layers import find_layers
from argosy.parallel.pipeline.micro_batches import cut, joined
from argosy.parallel.pipeline.partition import partition
from argosy.parallel.pipeline.parts import Parts, hold, prune
from argosy.parallel.pipeline.turn_schedule import places, turn_programs

IDS = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))


def cut_up(model: nn.Module, x: Any, cuts: list[str]) -> tuple[list[nn.Module], Cutting]:
    """All stages of a model in one process, each with everything."""
    cutting = Cutting(model, cuts)
    part = cut(x, None, 1)[0]
    parts = Parts.of(cutting.seen(part), cuts)
    stages = [cutting.stages(parts, [stage], part)[0] for stage in range(len(cuts) + 1)]
    for stage in stages:
        stage.begin([part], None)
    return list(stages), cutting


def through(stages: list[nn.Module]) -> Any:
    sent: Any = ()
    for stage in stages:
        sent = stage(*sent)
    return sent


def gpt() -> tuple[nn.Module, Any]:
    return GPT(), IDS


def masked() -> tuple[nn.Module, Any]:
    return Masked(), {"x": torch.randn(3, 8), "flag": torch.tensor(1)}


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


def convolutions() -> tuple[nn.Module, Any]:
    return Convolutions(), torch.randn(4, 1, 6, 6)


def transformer() -> tuple[nn.Module, Any]:
    both = (torch.randn(2, 5, 16), torch.randn(2, 5, 16))
    return nn.Transformer(16, 2, 2, 2, 32, 0.0, batch_first=True), both


def computed_weights() -> tuple[nn.Module, Any]:
    layers = (nn.utils.weight_norm(nn.Linear(4, 4)) for _ in range(3))  # its weight is computed, and no parameter
    return nn.Sequential(*layers), torch.randn(2, 4)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    ("make", "cuts"),
    [
        (gpt, ["blocks.1", "blocks.3", "norm"]),
        (gpt, ["drop", "blocks.2"]),
        (masked, ["blocks.0", "blocks.1", "last"]),
        (convolutions, ["2", "4", "5"]),
        (transformer, ["decoder"]),
        (computed_weights, ["1", "2"]),
    ],
)
def test_the_stages_one_after_the_other_are_the_model(
    make: Callable[[], tuple[nn.Module, Any]], cuts: list[str]
) -> None:
    torch.manual_seed(0)
    model, x = make()
    args, kwargs = (x, {}) if isinstance(x, tuple) else ((), x) if isinstance(x, dict) else ((x,), {})
    with torch.no_grad():
        expected = model.eval()(*args, **kwargs)
        stages, _ = cut_up(model, x, cuts)
        output = through(stages)
    if isinstance(expected, dict):
        assert output.keys() == expected.keys()
        assert all(torch.equal(output[key], expected[key]) for key in expected)
    else:
        assert torch.equal(output, expected)


def test_a_stage_runs_none_of_the_layers_before_it_and_none_behind_it() -> None:
    model = GPT()
    ran: list[str] = []
    stages, _ = cut_up(model, IDS, ["blocks.1", "blocks.2"])
    for name in ("tokens", "blocks.0", "blocks.1", "blocks.2", "norm"):
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: ran.append(name))
    sent = stages[0](*())
    assert ran == ["tokens", "blocks.0"]
    ran.clear()
    stages[1](*sent)
    assert ran == ["blocks.1"]


class Checkpointed(Masked):
    """Its blocks are computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        start = x = self.first(x) * self.scale
        mask = torch.ones(1)
        for block in self.blocks:
            x = checkpoint(block, x, start, mask, use_reentrant=False)
        return self.last(x)


def test_layers_may_be_checkpointed_wherever_a_stage_begins() -> None:
    torch.manual_seed(0)
    model = Checkpointed()
    inputs = torch.randn(6, 8)
    model(inputs).square().mean().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    cutting = Cutting(model, ["blocks.1"])
    batch = cut(inputs, None, 3)
    parts = Parts.of(cutting.seen(batch[0]), ["blocks.1"])
    first, second = (cutting.stages(parts, [stage], batch[0])[0] for stage in (0, 1))
    under_way = []
    for number in range(3):  # all forward, then all backward: what each was sent must not be mixed up
        for stage in (first, second):
            stage.begin(batch, None)
            stage.chunk = number
        sent = first()
        received = [tensor.detach().requires_grad_() for tensor in sent]
        under_way.append((sent, received, second(*received)))
    for sent, received, output in under_way:
        (output.square().mean() / 3).backward()
        torch.autograd.backward(sent, [tensor.grad for tensor in received])
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shapes_are_followed_under_autocast(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    autocast_forward(model, dtype)
    x = torch.randn(4, 8)
    expected = model(x)
    stages, cutting = cut_up(model, x, ["1", "2"])
    assert [meta.dtype for meta in cutting.crossing("2", cut(x, None, 1)[0])] == [dtype]
    assert torch.equal(through(stages), expected)
    assert expected.dtype == torch.float32


def test_dropout_follows_train_and_eval() -> None:
    model = GPT(dropout=0.5)
    stages, _ = cut_up(model, IDS, ["blocks.2"])
    assert not torch.equal(through(stages), through(stages))
    model.eval()
    assert torch.equal(through(stages), through(stages))


def test_the_model_itself_says_how_it_is_trained_now() -> None:
    model = GPT()
    _, cutting = cut_up(model, IDS, ["blocks.2"])
    with pytest.raises(RuntimeError, match=r"train with fleet.step\(x, y, loss_fn\) instead of model\(x\)"):
        model(IDS)
    cutting.gate.close()
    assert type(model) is GPT
    assert model(IDS).shape == (4, 16, 64)


def test_what_crosses_a_cut() -> None:
    _, cutting = cut_up(*masked(), ["blocks.1"])
    part = cut({"x": torch.randn(3, 8), "flag": torch.tensor(1)}, None, 1)[0]
    metas = cutting.crossing("blocks.1", part)  # x and start were computed; the mask is made from the inputs
    assert [(meta.shape, meta.requires_grad) for meta in metas] == [((3, 8), True)] * 2
    smaller = cut({"x": torch.randn(1, 8), "flag": torch.tensor(1)}, None, 1)[0]
    assert [meta.shape for meta in cutting.crossing("blocks.1", smaller)] == [(1, 8)] * 2


class Recurrent(nn.Module):
    """Its weights are in a list besides, and it is called by a model that asks a tensor for its number."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.first, self.asks = nn.Linear(4, 4), asks
        self.cells = nn.ModuleList(nn.LSTM(4, 4, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.asks and x.sum() > 0:
            x = -x
        for cell in self.cells:
            x, _ = cell(x)
        return x


@pytest.mark.parametrize(
    ("make", "x", "split", "stages", "said"),
    [
        (GPT, IDS, ["blocks.9"], 2, "the model has no module 'blocks.9'; it has tokens, positions, drop, blocks.0"),
        (GPT, IDS, ["positions"], 2, "no stage can begin at positions: nothing that was computed before goes into it"),
        (GPT, IDS, ["blocks.2", "blocks.1"], 3, "the model calls them in another order: blocks.1,blocks.2"),
        (GPT, IDS, ["blocks.1.mlp"], 2, "no stage can begin at blocks.1.mlp: 1 of the tensors computed before it"),
        (GPT, IDS, ["blocks.1.ln1"], 2, "no stage can begin at blocks.1.ln1: 1 of the tensors computed before it"),
        (
            GPT,
            IDS,
            ["blocks"],
            2,
            "no stage can begin at blocks: it is not called in forward (of a list, name a member)",
        ),
        (GPT, IDS, [], 9, "into 9 stages at 8 modules, and in GPT a stage can begin at drop, blocks.0, blocks.1,"),
        (
            Skipping,
            torch.randn(2, 8),
            [],
            3,
            "(not at middle.0: 1 of the tensors computed before it pass by it, to be used after it; not at middle.1: 1",
        ),
        (lambda: Recurrent(asks=True), torch.randn(2, 3, 4), [], 2, "may not depend on the numbers in a tensor"),
        (normed, torch.randn(1, 4), [], 2, "several samples in each micro-batch: say micro_batches="),
        (
            lambda: torch.compile(normed(), backend="eager"),
            torch.randn(2, 4),
            [],
            2,
            "a model that is compiled cannot be cut",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused_with_the_reason(
    make: Callable[[], nn.Module], x: Tensor, split: list[str], stages: int, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        Cutting(make(), split).check(cut(x, None, 1)[0], stages)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("config", "workers", "said"),
    [
        ({"schedule": "2f2b"}, 2, "schedule=2f2b: expected gpipe or 1f1b or interleaved or zero-bubble"),
        ({"micro_batches": 0}, 2, "micro_batches=0: a batch is cut into at least 1"),
        ({"micro_batches": 2}, 3, "micro_batches=2: schedule=1f1b keeps 3 workers busy with at least 3"),
        ({"micro_batches": 9, "schedule": "interleaved"}, 4, "goes in rounds of the 4 workers; say 8 or 12"),
        ({"split": "a,,b"}, 2, "split=a,,b: expected auto, or names"),
        ({"split": "a,a"}, 3, "split=a,a: a module is named twice"),
        ({"split": "a,b"}, 2, "schedule=1f1b on 2 workers has 2 stages, and this makes 3; name 1 module"),
        ({"split": "a", "schedule": "interleaved"}, 2, "this makes 2; name 3 modules for 4 stages"),
        ({"split": "a", "schedule": "zero-bubble"}, 2, "has 4 stages, and this makes 2; name 3 modules"),
    ],
)
def test_settings_that_cannot_work_are_refused(config: dict[str, Any], workers: int, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        PipelineConfig(**config).check_workers(workers)
    assert said in str(refused.value)


def test_layers_are_found_in_lists_however_deep() -> None:
    inner = nn.Module()
    inner.embedding, inner.blocks = nn.Linear(2, 2), nn.ModuleList(nn.Linear(9, 9) for _ in range(3))
    outer = nn.Module()
    outer.decoder, outer.head = inner, nn.Linear(2, 2)
    assert list(find_layers(outer)) == [
        "decoder.embedding",
        "decoder.blocks.0",
        "decoder.blocks.1",
        "decoder.blocks.2",
        "head",
    ]


def test_the_slowest_stage_is_as_fast_as_it_can_be() -> None:
    made = torch.Generator().manual_seed(3)
    for pieces, workers in ((5, (1, 1)), (7, (1, 1, 1)), (6, (3, 1)), (8, (2, 1, 3)), (3, (1, 1, 1))):
        costs = torch.rand(pieces, generator=made).tolist()

        def slowest(begins: Any, costs: list[float] = costs, workers: tuple[int, ...] = workers) -> float:
            edges = [0, *begins, len(costs)]
            return max(sum(costs[a:b]) / n for (a, b), n in zip(itertools.pairwise(edges), workers, strict=True))

        best = min(map(slowest, itertools.combinations(range(1, pieces), len(workers) - 1)))
        assert slowest(partition(costs, workers)) == pytest.approx(best)


def test_the_cost_is_timed_and_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = Convolutions()
    cutting = Cutting(model, [])
    part = cut(torch.randn(4, 1, 6, 6), None, 1)[0]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    costs = measured(model, cutting.gate, cutting.seen(part), part.args, part.kwargs)
    assert len(costs) == len(cutting.seen(part).cuts) + 1 == 8
    assert min(costs) > 0
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_every_parameter_has_a_holder_and_a_tied_one_has_two() -> None:
    cutting = Cutting(model := GPT(), ["blocks.2"])
    parts = Parts.of(cutting.seen(cut(IDS, None, 1)[0]), ["blocks.2"])
    assert {name for name, stages in parts.stages_of.items() if len(stages) > 1} == {"tokens.weight"}
    assert parts.held_by([0]) | parts.held_by([1]) == {name for name, _ in model.named_parameters()}
    assert parts.ties(lambda stage: (stage,), ["tokens.weight", "norm.bias"]) == {(0, 1): ["tokens.weight"]}


def test_what_is_not_held_is_freed_and_keeps_its_name_nowhere() -> None:
    model = Recurrent(asks=False)
    optimizer = torch.optim.AdamW(model.parameters())
    cutting = Cutting(model, ["cells.1"])
    x = torch.randn(2, 3, 4)
    parts = Parts.of(cutting.seen(part := cut(x, None, 1)[0]), ["cells.1"])
    whole = {name: parameter.numel() for name, parameter in model.named_parameters()}
    hold(model, cutting.ghost, parts.held_by([1]), lambda tensor: None, has_numbers=True)
    held = [name for name, _ in model.named_parameters()]
    assert held == [name for name in whole if name.startswith("cells.1")]
    prune(optimizer, list(model.parameters()), {})
    assert sum(p.numel() for group in optimizer.param_groups for p in group["params"]) == sum(map(whole.get, held))
    (stage,) = cutting.stages(parts, [1], part)
    stage.begin([part], None)
    assert stage(torch.randn(2, 3, 4)).shape == (2, 3, 4)


def test_a_model_without_numbers_gets_memory_for_what_is_held() -> None:
    with torch.device("meta"):
        model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cutting = Cutting(model, ["blocks.2"])
    part = cut(IDS, None, 1)[0]
    seen = cutting.seen(part)
    costs = counted({name: tensor.numel() for name, tensor in cutting.ghost.named.items()}, seen)
    assert partition(costs, [1, 1]) == [4]  # behind the embeddings, drop, blocks.0 and blocks.1
    parts = Parts.of(seen, ["blocks.2"])
    held = hold(model, cutting.ghost, parts.held_by([1]), lambda tensor: None, has_numbers=False)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert set(held.unset) == {name for name, _ in model.named_parameters()}
    assert model.head.weight is model.tokens.weight
    prune(optimizer, list(model.parameters()), held.moved)
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}


def test_a_batch_is_cut_and_joined() -> None:
    x = {"ids": torch.arange(10).view(5, 2), "shared": torch.tensor(7), "name": "x"}
    parts = cut(x, torch.arange(5), 3)
    assert [(part.samples, part.weight, part.y.tolist()) for part in parts] == [
        (2, 0.4, [0, 1]),
        (2, 0.4, [2, 3]),
        (1, 0.2, [4]),
    ]
    assert all(part.kwargs["shared"] == 7 and part.kwargs["name"] == "x" for part in parts)
    assert torch.equal(joined([part.kwargs for part in parts], [2, 2, 1])["ids"], x["ids"])
    with pytest.raises(TypeError, match="cuts targets with their samples, and a list has no tensor"):
        cut(x, ["a", "b", "c", "d", "e"], 3)
    few = cut(torch.ones(1, 3), torch.ones(1), 3)
    assert [(part.samples, part.weight) for part in few] == [(1, 1.0), (1, 0.0), (1, 0.0)]
    none = cut(torch.ones(0, 3), torch.ones(0), 2)
    assert [(part.args[0].shape, part.weight) for part in none] == [((1, 3), 0.0)] * 2


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_theory_is_the_textbooks(schedule: str) -> None:
    for workers, count in ((2, 4), (3, 8), (4, 4)):
        programs = in_line(workers, count, ahead=schedule == "gpipe")
        assert theory(programs) == pytest.approx((workers - 1) / (count + workers - 1))


def test_a_schedule_that_waits_for_itself_is_found_out() -> None:
    programs = {0: [Action("B", 0, 0), Action("F", 0, 0)], 1: [Action("F", 1, 0), Action("B", 1, 0)]}
    with pytest.raises(ValueError, match="waits for itself"):
        theory(programs)


@pytest.mark.parametrize("counts", [[1, 1], [2, 2], [3, 1], [1, 3], [2, 3, 1], [1, 4, 2], [5, 1, 1, 3]])
def test_unequal_stages_never_wait_for_each_other_for_ever(counts: list[int]) -> None:
    for count in (1, 2, 5, 12, 13):
        programs = turn_programs(counts, count)
        theory(programs)  # plays it to the end, or raises
        for stage, workers in places(counts).items():
            for turn, worker in enumerate(workers):
                mine = list(range(turn, count, counts[stage]))
                for kind in "FB":
                    done = [action.micro_batch for action in programs[worker] if action.kind == kind]
                    assert done == mine
                    assert all(action.stage == stage for action in programs[worker])


def test_where_the_first_stage_costs_three_times_as_much_three_workers_for_it_leave_less_idle() -> None:
    lengths = {0: 3.0, 1: 1.0}
    three, two = (theory(turn_programs(counts, 12), lengths) for counts in ([3, 1], [2, 2]))
    assert three < 0.25 < 0.3 < two
