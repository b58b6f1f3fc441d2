"""Models in parts, through the launcher and the facade, compute what one process computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launching import FORKED, succeed
from safetensors.torch import load_file
from torch import Tensor

SCRIPT = Path(__file__).parent / "scripts" / "large.py"
pytestmark = pytest.mark.timeout(300)
MODES: dict[str, tuple[int, list[str]]] = {
    "sharded": (
        2,
        [
            "loop|batch=global shard_stage=1",
            "loop|batch=global shard_stage=2",
            "batch=global shard_stage=3 recompute=every:2",
        ],
    ),
    "unevenly": (3, ["batch=global shard_stage=1", "loop|batch=global shard_stage=3"]),  # one has no sample at times
    "replicated": (4, ["loop|batch=global data=2 shard_stage=1", "batch=global data=2 shard_stage=3"]),
    "divided": (2, ["tensor=2", "loop|batch=global tensor=2 sequence_parallel=true"]),
    "divided and more": (
        4,
        [
            "batch=global data=2 tensor=2",
            "loop|batch=global tensor=2 shard_stage=3 shard_modules=blocks.* recompute=every:1",
            "batch=global tensor=2 shard_stage=3 shard_modules=*.qkv,*.out",
        ],
    ),
    "staged": (
        2,
        [
            "pipeline=2 schedule=gpipe",
            "pipeline=2 schedule=1f1b split=blocks.1",
            "pipeline=2 schedule=interleaved",
            "pipeline=2 schedule=zero-bubble",
        ],
    ),
    "staged and more": (4, ["batch=global pipeline=2", "batch=global pipeline=2 shard_stage=3", "pipeline=[3,1]"]),
    "staged and divided": (
        4,
        [
            "pipeline=2 tensor=2 micro_batches=2",
            "pipeline=2 tensor=2 micro_batches=2 schedule=interleaved sequence_parallel=true",
            "pipeline=2 tensor=2 micro_batches=2 schedule=zero-bubble recompute=every:2",
        ],
    ),
    "all at once": (
        8,
        [
            "batch=global pipeline=2 tensor=2 micro_batches=2 shard_stage=3",
            "batch=global pipeline=2 tensor=2 micro_batches=2 data=2 schedule=interleaved",
        ],
    ),
}
ACCUMULATED = {
    3: ["batch=global accumulate=3 shard_stage=1", "batch=global accumulate=3 shard_stage=3"],
    4: ["accumulate=3 pipeline=2 tensor=2"],
    2: ["tuned|accumulate=3 pipeline=2 split=blocks.1"],  # the first stage is frozen
}
DIRECT = ["direct|pipeline=2 schedule=zero-bubble", "direct|tensor=2", "direct|batch=global shard_stage=3"]
OPTIMIZERS = {
    "sgd": ["loop sgd|batch=global shard_stage=1", "sgd|batch=global shard_stage=3", "sgd|pipeline=2"],
    "lars": ["lars|batch=global shard_stage=1", "lars|batch=global shard_stage=3", "lars|tensor=2"],
    "lamb": ["lamb|batch=global shard_stage=1", "lamb|batch=global shard_stage=2", "lamb|tensor=2"],
}
TUNED = {
    2: [
        "tuned|pipeline=2 schedule=zero-bubble",
        "tuned|pipeline=2 split=blocks.1",
        "tuned|tensor=2",
        "tuned|batch=global shard_stage=3",
    ],
    4: [
        "tuned|batch=global pipeline=2 data=2 split=blocks.1",
        "tuned|batch=global pipeline=2 shard=2 shard_stage=2 split=blocks.1",
    ],
}
RATES = "lr_scale=linear warmup=6 ramp=2:1epochs"
RATED = [
    f"batch=global shard_stage=1 {RATES}",
    f"batch=global shard_stage=3 {RATES}",
    f"tensor=2 {RATES}",
    f"pipeline=2 {RATES}",
]
CLOSE = [
    "batch=global shard_stage=3 precision=bf16",
    "tensor=2 precision=bf16",
    "pipeline=2 precision=bf16",
    "batch=global shard_stage=1 compress=int8",
    "batch=global shard_stage=3 average=ema:0.9",
    "batch=global shard_stage=3 compress=bf16",
]
EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt.py"
LOSS, PARAMETERS = 1e-4, 1e-4

Told = dict[str, Tensor]


def trained(folder: Path, workers: int, strategies: list[str]) -> dict[str, list[Told]]:
    """What each rank holds after each of the strategies."""
    succeed([*FORKED, "run", "--workers", str(workers), SCRIPT, folder, *strategies], deadline_seconds=240)
    return {
        strategy: [
            load_file(folder / f"{strategy.replace('|', ' ')}, rank {rank}.safetensors") for rank in range(workers)
        ]
        for strategy in strategies
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    words = (*OPTIMIZERS, "direct", "tuned")
    lines = ["batch=global", "batch=global accumulate=3", f"batch=global {RATES}"]
    lines += [f"{word}|batch=global" for word in words] + ["tuned|batch=global accumulate=3"]
    told = trained(tmp_path_factory.mktemp("alone"), 1, lines)
    return {line: ranks[0] for line, ranks in told.items()}


def check(ranks: list[Told], alone: Told, steps: int = 22) -> None:
    assert len(alone["losses"]) == steps
    assert alone["losses"][-5:].mean() < alone["losses"][:5].mean() - 0.1
    for told in ranks:
        torch.testing.assert_close(told["losses"], alone["losses"], rtol=LOSS, atol=0)
        for name, parameter in told.items():
            torch.testing.assert_close(parameter, alone[name], rtol=PARAMETERS, atol=PARAMETERS, msg=name)


@pytest.mark.parametrize("way", MODES)
def test_a_model_in_parts_learns_what_one_process_learns(alone: dict[str, Told], tmp_path: Path, way: str) -> None:
    for strategy, ranks in trained(tmp_path, *MODES[way]).items():
        assert set().union(*ranks) == set(alone["batch=global"]), strategy
        check(ranks, alone["batch=global"])


@pytest.mark.parametrize("workers", ACCUMULATED)
def test_batches_are_added_up(alone: dict[str, Told], tmp_path: Path, workers: int) -> None:
    for strategy, ranks in trained(tmp_path, workers, ACCUMULATED[workers]).items():
        parameters = [{name: value for name, value in told.items() if name != "losses"} for told in ranks]
        expected = alone[f"{'tuned|' * strategy.startswith('tuned')}batch=global accumulate=3"]
        check([told | {"losses": expected["losses"]} for told in parameters], expected)


@pytest.mark.parametrize("workers", TUNED)
def test_a_whole_stage_may_be_frozen_and_buffers_change(alone: dict[str, Told], tmp_path: Path, workers: int) -> None:
    for ranks in trained(tmp_path, workers, TUNED[workers]).values():
        check(ranks, alone["tuned|batch=global"])


def test_rules_for_rates_and_batches_go_with_models_in_parts(alone: dict[str, Told], tmp_path: Path) -> None:
    for ranks in trained(tmp_path, 2, RATED).values():
        check(ranks, alone[f"batch=global {RATES}"], steps=32)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_see_whole_parameters(alone: dict[str, Told], tmp_path: Path, name: str) -> None:
    for ranks in trained(tmp_path, 2, OPTIMIZERS[name]).values():
        check(ranks, alone[f"{name}|batch=global"])


def test_the_rest_of_a_strategy_goes_with_it(alone: dict[str, Told], tmp_path: Path) -> None:
    for strategy, ranks in trained(tmp_path, 2, CLOSE).items():
        for told in ranks:
            torch.testing.assert_close(told["losses"], alone["batch=global"]["losses"], rtol=1e-3, atol=0, msg=strategy)


def test_the_example_goes_on_in_each_mode_where_another_left_off(tmp_path: Path) -> None:
    size = ["--layers", "2", "--width", "32", "--length", "32", "--kbytes", "16", "--batch", "8"]
    modes = ((1, ""), (2, "shard_stage=3"), (2, "tensor=2"), (2, "pipeline=2"), (2, "shard_stage=1"))
    losses = []
    for turn, (workers, strategy) in enumerate(modes, 1):
        command = [*FORKED, "run", "--workers", str(workers), "--strategy", strategy, EXAMPLE, *size]
        done = succeed([*command, "--steps", str(12 * turn), "--save", tmp_path / "kept"])
        assert f"going on after {12 * turn - 12} steps" in done.out or turn == 1
        losses.append(float(done.out.rpartition("loss ")[2]))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.3


def test_a_models_own_code_may_use_its_parameters(alone: dict[str, Told], tmp_path: Path) -> None:
    for ranks in trained(tmp_path, 2, DIRECT).values():
        check(ranks, alone["direct|batch=global"])


def test_models_in_stages_are_trained_one_after_the_other() -> None:
    done = succeed([*FORKED, "run", "--workers", "2", SCRIPT.parent / "two_models.py"])
    first, second = (line.split()[-4:] for line in done.out.splitlines() if "losses" in line)
    assert first == second == sorted(first, reverse=True)
    assert "refused: an optimizer trains several models that are cut into stages" in done.out


LETTING_GO = """
import gc, weakref
import torch
from torch import nn
import argosy

fleet = argosy.init()
net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
wholes = [weakref.ref(parameter) for parameter in net.parameters()]
optimizer = torch.optim.AdamW(net.parameters())
model, optimizer = fleet.distribute(net, optimizer)
gc.collect()
print("still there:", sum(whole() is not None for whole in wholes))
"""


@pytest.mark.parametrize("strategy", ["shard_stage=2", "shard_stage=3", "tensor=2"])
def test_a_divided_model_is_held_whole_by_nobody(tmp_path: Path, strategy: str) -> None:
    script = tmp_path / "letting_go.py"
    script.write_text(LETTING_GO)
    done = succeed([*FORKED, "run", "--workers", "2", "--strategy", strategy, script])
    assert done.out.count("still there: 0") == 2, done.out


ROUNDED = """
import torch
from torch import nn
import argosy

fleet = argosy.init()
torch.manual_seed(0)
net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
model, optimizer = fleet.distribute(net, torch.optim.SGD(net.parameters(), lr=0.1))
fleet.step(torch.randn(16, 8), torch.randn(16, 8), nn.functional.mse_loss)
gradients = [parameter.grad.to_local() for parameter in model.parameters() if parameter.grad is not None]
assert any(gradient.any() for gradient in gradients)
print("16 bits:", all(torch.equal(gradient, gradient.bfloat16().float()) for gradient in gradients))
"""

ADDED_UP = """
import torch
from torch import nn
import argosy

fleet = argosy.init()
model = fleet.distribute(nn.Linear(4, 4, bias=False))
with fleet.no_sync():
    for _ in range(299):
        model(torch.ones(1, 4)).sum().backward()
model(torch.ones(1, 4)).sum().backward()
print("sum:", set(model.weight.grad.to_local().flatten().tolist()))
double = fleet.distribute(nn.Linear(4, 4, bias=False).double())
double(torch.full((1, 4), 1 / 3, dtype=torch.float64)).sum().backward()
print("third:", set(double.weight.grad.to_local().flatten().tolist()))
"""


@pytest.mark.parametrize(
    ("workers", "strategy"),
    [(2, "shard_stage=3"), (4, "data=2 tensor=2 tensor_plan=0:column,1:row"), (4, "data=2 pipeline=2")],
)
def test_gradients_of_models_in_parts_travel_in_16_bits_if_that_is_asked_for(
    tmp_path: Path, workers: int, strategy: str
) -> None:
    script = tmp_path / "rounded.py"
    script.write_text(ROUNDED)
    for compress, rounded in (("none", "False"), ("bf16", "True")):
        line = f"{strategy} compress={compress}"
        done = succeed([*FORKED, "run", "--workers", str(workers), "--strategy", line, script])
        assert done.out.count(f"16 bits: {rounded}") == workers, done.out


def test_gradients_that_are_not_sent_yet_are_added_up_as_they_are(tmp_path: Path) -> None:
    script = tmp_path / "added_up.py"
    script.write_text(ADDED_UP)
    done = succeed([*FORKED, "run", "--workers", "2", "--strategy", "shard_stage=3 compress=bf16", script])
    assert done.out.count("sum: {300.0}") == 2, done.out  # in 16 bits, 256 and 1 are 256
    assert done.out.count(f"third: {{{1 / 3}}}") == 2, done.out
