"""What a user may choose about learning rates, averages of parameters and precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from argosy.config import Config, ConfigError, Span, parse_span

EMA_DECAY: Final = 0.999


@dataclass(frozen=True)
class OptimConfig(Config):
    """What happens around the script's own optimizer. By default nothing does.

    `lr_scale`: the script's learning rate times global batch / script's batch (`linear`), or times its root (`sqrt`).
    `warmup`: how long the learning rate takes to rise to that: `warmup=500` steps, or `warmup=5epochs`.
    `average`: keep an exponential moving average of the parameters: `average=ema:0.999`.
    `precision`: what the model computes in. Parameters, gradients and the optimizer stay fp32.

    >>> OptimConfig(warmup="5epochs").warmup_span()
    Span(count=5, unit='epochs')
    >>> OptimConfig(average="ema:0.99").decay()
    0.99
    """

    lr_scale: Literal["none", "linear", "sqrt"] = "none"
    warmup: int | str = "none"
    average: str = "none"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"

    def check(self) -> None:
        """Refuse what cannot be read as a length or an average."""
        if isinstance(self.warmup, str) and self.warmup.isdecimal():
            object.__setattr__(self, "warmup", int(self.warmup))  # one spelling, lest equal choices differ
        self.warmup_span()
        self.decay()

    def warmup_span(self) -> Span | None:
        """How long the learning rate warms up; None if it does not."""
        if self.warmup == "none":
            return None
        span = parse_span(str(self.warmup))
        if span is None:
            fix = "expected steps such as warmup=500, or warmup=5epochs, or none; a length is below 10^15"
            raise ConfigError("warmup", self.warmup, fix)
        return span

    def decay(self) -> float | None:
        """How much of the average each step keeps; None if there is no average."""
        if self.average == "none":
            return None
        kind, colon, text = self.average.partition(":")
        try:
            decay = float(text) if colon else EMA_DECAY
        except ValueError:
            decay = -1.0
        if kind != "ema" or not 0 < decay < 1:
            fix = "expected ema with how much of it each step keeps, between 0 and 1: average=ema:0.999, or none"
            raise ConfigError("average", self.average, fix)
        return decay
