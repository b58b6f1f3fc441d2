"""What a user may choose about how often replicas meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, cast

from argosy.config import Config, ConfigError

Kind = Literal["step", "local", "adaptive", "diloco"]
_FIX: Final = "expected step, local:8, adaptive:16, diloco:100 or diloco:100:int4, where the number counts steps"


@dataclass(frozen=True)
class Rounds:
    """How often replicas become one and how: every `period` steps, the differences sent with `bits` if not whole."""

    kind: Kind
    period: int = 1
    bits: Literal[4] | None = None


@dataclass(frozen=True)
class LocalConfig(Config):
    """When replicas meet: `sync=step` averages gradients in each step, the others parameters every k steps.

    `local:k`: each replica trains alone, and every k steps the parameters are averaged.
    `adaptive:k`: the same; k is the first and longest period, and it shrinks as the loss falls (`period.py`).
    `diloco:k`, `diloco:k:int4`: the mean difference of k steps is a gradient for Nesterov's method, `outer_lr` and
    `outer_momentum` being its settings; `int4` sends the differences with 4 bits.

    >>> LocalConfig(sync="diloco:100:int4").rounds()
    Rounds(kind='diloco', period=100, bits=4)
    """

    sync: str = "step"
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def check(self) -> None:
        """Refuse what is no way to synchronise, and options of one that is not used."""
        kind = self.rounds().kind
        if self.outer_lr <= 0:
            raise ConfigError("outer_lr", self.outer_lr, "a learning rate is above 0; 0.7 is the usual one")
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError("outer_momentum", self.outer_momentum, "expected 0 or more and below 1; 0.9 is usual")
        if kind != "diloco" and (self.outer_lr, self.outer_momentum) != (0.7, 0.9):
            raise ConfigError("sync", self.sync, "outer_lr and outer_momentum are for sync=diloco:k")

    def rounds(self) -> Rounds:
        """What `sync` says."""
        kind, *options = self.sync.split(":")
        if kind == "step" and not options:
            return Rounds("step")
        bits: Literal[4] | None = 4 if kind == "diloco" and options[1:] == ["int4"] else None
        known = kind in ("local", "adaptive", "diloco") and len(options) == (1 if bits is None else 2)
        if not known or not options[0].isdecimal() or int(options[0]) < 1:
            raise ConfigError("sync", self.sync, _FIX)
        return Rounds(cast(Kind, kind), int(options[0]), bits)
