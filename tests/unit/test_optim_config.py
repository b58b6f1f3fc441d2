"""What may be said about learning rates, averages, precision and ramps, and what is refused."""

import subprocess
import sys

import pytest

from argosy.config import Config, ConfigError, Span
from argosy.data.batches import BatchConfig
from argosy.data.ramp import Ramp
from argosy.optim.config import OptimConfig
from argosy.parallel.config import ReducerConfig


def test_by_default_nothing_is_asked_for() -> None:
    config = OptimConfig()
    assert config.warmup_span() is None
    assert config.decay() is None
    assert Ramp.parse(BatchConfig().ramp) is None


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (500, Span(500, "steps")),
        ("500", Span(500, "steps")),
        ("1step", Span(1, "steps")),
        ("5epochs", Span(5, "epochs")),
        ("1epoch", Span(1, "epochs")),
    ],
)
def test_a_warm_up_is_told_in_steps_or_epochs(said: int | str, meant: Span) -> None:
    assert OptimConfig(warmup=said).warmup_span() == meant


def test_an_average_is_told_by_its_decay() -> None:
    assert OptimConfig(average="ema:0.99").decay() == 0.99
    assert OptimConfig(average="ema").decay() == 0.999


@pytest.mark.parametrize(
    ("kind", "field", "value", "fix"),
    [
        (OptimConfig, "warmup", "soon", "warmup=5epochs"),
        (OptimConfig, "warmup", 0, "warmup=500"),
        (OptimConfig, "warmup", -3, "warmup=500"),
        (OptimConfig, "warmup", "1.5epochs", "warmup=5epochs"),
        (OptimConfig, "warmup", True, "expected"),
        (OptimConfig, "warmup", f"1{'0' * 15}epochs", "below 10^15"),
        (OptimConfig, "average", "ema:1", "average=ema:0.999"),
        (OptimConfig, "average", "ema:", "average=ema:0.999"),
        (OptimConfig, "average", "ema:nan", "average=ema:0.999"),
        (OptimConfig, "average", "mean", "average=ema:0.999"),
        (OptimConfig, "lr_scale", "cubic", "none or linear or sqrt"),
        (OptimConfig, "precision", "int8", "fp32 or bf16 or fp16"),
        (BatchConfig, "ramp", "4", "ramp=4:3epochs"),
        (BatchConfig, "ramp", f"4:1{'0' * 15}", "below 10^15"),
        (ReducerConfig, "bucket_mbytes", 5000, "at most 4096"),
        (BatchConfig, "ramp", "1:3epochs", "ramp=4:3epochs"),
        (BatchConfig, "ramp", "4:0epochs", "ramp=4:3epochs"),
        (BatchConfig, "ramp", "x:3epochs", "ramp=4:3epochs"),
        (BatchConfig, "ramp", "", "ramp=4:3epochs"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_fix(kind: type[Config], field: str, value: object, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**{field: value})
    assert caught.value.field == field
    assert caught.value.value == value
    assert fix in caught.value.fix


def test_settings_are_read_without_torch() -> None:
    code = "import sys, argosy.optim.config, argosy.data.ramp; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
