"""Learning-rate schedules of server optimizers: a factor for each global step, as a pure function of it.

Servers keep no schedule: a worker knows the step it pushes for, and sends the factor along. It is written as text,
so that a strategy can hold it too.
"""

from __future__ import annotations

import math

from argosy.config import ConfigError

_ALLOWED = '"warmup:100", "step:1000:0.5", "exponential:1000:0.9", "cosine:10000" or "linear:10000"'


def factor(schedule: str, step: int) -> float:
    """What the learning rate is multiplied by in step `step`, counted from 0.

    - `""`: 1.
    - `"warmup:n"`: rises in n steps, from 1/n to 1, and stays.
    - `"step:n:f"`: multiplied by f after every n steps.
    - `"exponential:n:f"`: the same, but smoothly: f to the power step/n.
    - `"cosine:n"`: falls along half a cosine to 0 in n steps, and stays.
    - `"linear:n"`: falls in a line to 0 in n steps, and stays.

    >>> [factor("warmup:4", step) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    >>> factor("step:10:0.5", 25)
    0.25
    """
    if not schedule:
        return 1.0
    name, steps, rate = _parsed(schedule)
    if step < 0:
        raise ValueError(f"step is {step}: steps are counted from 0")
    if name == "warmup":
        return min((step + 1) / steps, 1.0)
    if name == "step":
        return float(rate ** (step // steps))
    if name == "exponential":
        return float(rate ** (step / steps))
    share = min(step / steps, 1.0)
    return (1 + math.cos(math.pi * share)) / 2 if name == "cosine" else 1 - share


def check_schedule(schedule: str) -> None:
    """Refuse what is no schedule."""
    if schedule:
        _parsed(schedule)


def _parsed(schedule: str) -> tuple[str, int, float]:
    name, *numbers = schedule.split(":")
    wanted = {"warmup": 1, "cosine": 1, "linear": 1, "step": 2, "exponential": 2}.get(name)
    try:
        if wanted != len(numbers):
            raise ValueError
        steps, rate = int(numbers[0]), float(numbers[1]) if wanted == 2 else 1.0
    except ValueError:
        raise ConfigError("schedule", schedule, f"expected {_ALLOWED}, or nothing") from None
    if steps < 1:
        raise ConfigError("schedule", schedule, "the number of steps must be 1 or more")
    if not 0 < rate < math.inf:
        raise ConfigError("schedule", schedule, "the rate must be above 0")
    return name, steps, rate
