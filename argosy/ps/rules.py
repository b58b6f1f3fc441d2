"""The optimizers that servers update rows with: what a user writes, and what the native table makes of it.

The formulas are torch.optim's own, applied lazily: a row is updated when it is pushed, and nothing happens to it in
between. For a row that is pushed at every step, the numbers are torch's. Adam's bias is corrected by the row's own
number of updates, and weight decay acts on pushed rows only. All formulas are in `csrc/rule_kernels.h`.
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Final

from argosy._native import table_config as native_config
from argosy.config import ConfigError, describe, fits
from argosy.ps.entry import Entry
from argosy.ps.initializers import Initial
from argosy.ps.schedule import check_schedule, factor

MOST_DIM: Final = 65536  # columns of a row


@dataclass(frozen=True)
class RowRule:
    """What all rules have: a learning rate, and a schedule that multiplies it (`schedule.py`)."""

    lr: float
    schedule: str = dataclasses.field(default="", kw_only=True)
    _kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(type(self)).items():
            value = getattr(self, name)
            if name.startswith("_"):
                continue
            if hint in (bool, str):
                if not fits(value, hint):
                    raise ConfigError(name, value, f"expected {describe(hint)}, not {value!r}")
                continue
            several = hint is not float and isinstance(value, (tuple, list))
            numbers = tuple(_plain(part) for part in (value if several else (value,)))
            if not all(fits(part, float) and part >= 0 for part in numbers):
                raise ConfigError(name, value, f"expected a finite number, 0 or more, not {value!r}")
            object.__setattr__(self, name, numbers if several else numbers[0])
        check_schedule(self.schedule)

    def kind(self) -> str:
        """The name of the native rule."""
        return self._kind

    def numbers(self) -> dict[str, Any]:
        """The numbers of the native rule."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "schedule"}

    def factor(self, step: int) -> float:
        """What the schedule multiplies the learning rate by in a step."""
        return factor(self.schedule, step)


def _plain(number: Any) -> Any:
    """NumPy's numbers as Python's; anything else as it is."""
    return float(number) if isinstance(number, Real) and not isinstance(number, (bool, int)) else number


@dataclass(frozen=True)
class SGD(RowRule):
    """Plain gradient descent.

    >>> SGD(0.1, schedule="linear:100").factor(50)
    0.5
    """

    _kind: ClassVar[str] = "sgd"


@dataclass(frozen=True)
class Momentum(RowRule):
    """Gradient descent with momentum, as `torch.optim.SGD(momentum=...)`.

    >>> Momentum(0.1, nesterov=True).momentum
    0.9
    """

    momentum: float = 0.9
    nesterov: bool = False
    _kind: ClassVar[str] = "momentum"


@dataclass(frozen=True)
class Adagrad(RowRule):
    """Adagrad; `rowwise` keeps one sum for a row, of its mean square, in place of one for each column.

    >>> Adagrad(0.05, rowwise=True).kind()
    'adagrad_row'
    """

    eps: float = 1e-10
    initial_accumulator: float = 0.0
    rowwise: bool = False

    def kind(self) -> str:
        """The name of the native rule."""
        return "adagrad_row" if self.rowwise else "adagrad"

    def numbers(self) -> dict[str, Any]:
        """The numbers of the native rule."""
        return {"lr": self.lr, "eps": self.eps, "initial_accumulator": self.initial_accumulator}


@dataclass(frozen=True)
class RMSProp(RowRule):
    """RMSProp.

    >>> RMSProp(0.01).alpha
    0.99
    """

    alpha: float = 0.99
    eps: float = 1e-8
    _kind: ClassVar[str] = "rmsprop"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha > 1:
            raise ConfigError("alpha", self.alpha, "it is a share, from 0 to 1")


@dataclass(frozen=True)
class Adam(RowRule):
    """Adam, lazy: the moments of a row decay when it is pushed.

    >>> Adam(0.001).kind()
    'adam'
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    _kind: ClassVar[str] = "adam"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2 or max(self.betas) >= 1:
            raise ConfigError("betas", self.betas, "two numbers below 1")

    def numbers(self) -> dict[str, Any]:
        """The numbers of the native rule."""
        return {"lr": self.lr, "beta1": self.betas[0], "beta2": self.betas[1], "eps": self.eps}


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay, of the rows that are pushed.

    >>> AdamW(0.001).weight_decay
    0.01
    """

    weight_decay: float = 0.01
    _kind: ClassVar[str] = "adamw"

    def numbers(self) -> dict[str, Any]:
        """The numbers of the native rule."""
        return {**super().numbers(), "weight_decay": self.weight_decay}


@dataclass(frozen=True)
class FTRL(RowRule):
    """FTRL-proximal (McMahan et al. 2013): weights that `l1` makes exactly zero where they matter little.

    >>> FTRL(0.1, l1=1.0).beta
    1.0
    """

    l1: float = 0.0
    l2: float = 0.0
    beta: float = 1.0
    initial_accumulator: float = 0.0
    _kind: ClassVar[str] = "ftrl"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr == 0:
            raise ConfigError("lr", self.lr, "FTRL divides by it: it must be above 0")

    def numbers(self) -> dict[str, Any]:
        """The numbers of the native rule."""
        return {
            "lr": self.lr,
            "l1": self.l1,
            "l2": self.l2,
            "beta1": self.beta,
            "initial_accumulator": self.initial_accumulator,
        }


def table_config(
    dim: int, rule: RowRule | None, initializer: str = "zeros", entry: str = "always", seed: int = 0
) -> bytes:
    """What a native table is made from. Without a rule, what is pushed is added: so deltas are merged.

    >>> from argosy._native import Table
    >>> table = Table(table_config(4, SGD(0.1), "constant:1", "count:2"))
    >>> table.rows
    0
    """
    if not 1 <= dim <= MOST_DIM:
        raise ConfigError("dim", dim, f"a row has from 1 to {MOST_DIM} columns")
    initial, admission = Initial.parsed(initializer), Entry.parsed(entry)
    return native_config(
        dim,
        rule.kind() if rule is not None else "add",
        **(rule.numbers() if rule is not None else {}),
        initializer=initial.kind,
        low_or_mean=initial.low_or_mean,
        high_or_std=initial.high_or_std,
        seed=seed % 2**64,
        admission=admission.kind,
        count=admission.count,
        probability=admission.probability,
    )
