"""What a user may choose about the parameter server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, cast

from argosy.config import Config, ConfigError

Kind = Literal["none", "sync", "async", "ssp", "half-async", "geo"]

# For the kinds that take a number after a colon: the least it may be.
_NUMBERED: Final = {"ssp": 0, "half-async": 1, "geo": 1}
_FIX: Final = "expected none, sync, async, async:dc, ssp:4, half-async:4 or geo:50, where the number counts steps"


@dataclass(frozen=True)
class Consistency:
    """How far workers may be apart: a kind, the number that belongs to it, and whether delays are compensated."""

    kind: Kind
    number: int = 0
    compensated: bool = False

    @property
    def is_asynchronous(self) -> bool:
        """Whether a worker's steps are its own, and not the whole job's."""
        return self.kind not in ("none", "sync")


@dataclass(frozen=True)
class PsConfig(Config):
    """How workers meet at servers, `ps=async` say, and what travels between them.

    `ps`: `sync` applies a step when the gradients of all workers are in, or of as many as `aggregate` says; `async`
    applies each at once, and `async:dc` makes up for its delay; `ssp:s` lets nobody be more than s steps ahead of the
    slowest; `half-async:k` merges up to k steps while a push is under way; `geo:k` trains alone and sends what k steps
    changed. `dense`: parameters other than tables live on servers too, or are kept one by `allreduce` among workers.
    `ps_values`: what rows and gradients are sent as. `not_finite`: what becomes of a gradient with a NaN or infinity:
    an error for who pushed it, or only a count. `lease_samples`: how many samples a worker takes at a time, at most.

    >>> PsConfig(ps="ssp:4").consistency()
    Consistency(kind='ssp', number=4, compensated=False)
    >>> PsConfig(ps="ssp")
    Traceback (most recent call last):
    argosy.config.ConfigError: ps=ssp: ssp takes a number of steps, 0 or more: ps=ssp:4
    """

    ps: str = "none"
    aggregate: int | None = None
    dense: Literal["server", "allreduce"] = "server"
    ps_values: Literal["fp32", "fp16", "int8"] = "fp32"
    not_finite: Literal["reject", "count"] = "reject"
    lease_samples: int | None = None

    def check(self) -> None:
        """Refuse what is no consistency, and options of one that is not used."""
        kind = self.consistency().kind
        if kind == "none":
            for name, default in _DEFAULTS.items():
                if getattr(self, name) != default:
                    raise ConfigError(name, getattr(self, name), "it is for a parameter server; say ps=async, or sync")
        if self.aggregate is not None:
            if kind != "sync":
                fix = f"it is for ps=sync, where steps wait for gradients; ps={self.ps} does not wait, leave it out"
                raise ConfigError("aggregate", self.aggregate, fix)
            if self.aggregate < 1:
                raise ConfigError("aggregate", self.aggregate, "a step waits for the gradients of at least 1 worker")
        if self.lease_samples is not None:
            if not self.has_leases:
                fix = "samples are taken by lease in asynchronous modes with dense=server; leave it out"
                raise ConfigError("lease_samples", self.lease_samples, fix)
            if self.lease_samples < 1:
                raise ConfigError("lease_samples", self.lease_samples, "a worker takes at least 1 sample at a time")

    @property
    def has_leases(self) -> bool:
        """Whether workers take samples from a queue: where none of them waits for another's step."""
        return self.consistency().is_asynchronous and self.dense == "server"

    @property
    def rejects(self) -> bool:
        """Whether a gradient that is not finite is an error, and not only counted."""
        return self.not_finite == "reject"

    def needed(self, workers: int) -> int:
        """How many of the workers must live for the job to go on."""
        if self.has_leases:
            return 1
        waits = self.consistency().kind == "sync" and self.dense == "server" and self.aggregate is not None
        return cast(int, self.aggregate) if waits else workers

    @property
    def steps_sent(self) -> int:
        """How many steps of a worker are always sent together."""
        mode = self.consistency()
        return mode.number if mode.kind == "geo" else 1

    def bears_losses(self, workers: int) -> bool:
        """Whether the job goes on when one of its workers is lost."""
        return self.needed(workers) < workers

    def gathered(self, workers: int) -> int:
        """How many gradients a server gathers before it applies a step; 0 if each is applied at once."""
        return (self.aggregate or workers) if self.consistency().kind == "sync" else 0

    def consistency(self) -> Consistency:
        """What `ps` says."""
        kind, colon, text = self.ps.partition(":")
        if kind in ("none", "sync", "async"):
            if colon and (kind, text) != ("async", "dc"):
                raise ConfigError("ps", self.ps, _FIX)
            return Consistency(cast(Kind, kind), compensated=text == "dc")
        if kind not in _NUMBERED:
            raise ConfigError("ps", self.ps, _FIX)
        least = _NUMBERED[kind]
        if not (text.isascii() and text.isdecimal()) or not least <= int(text) < 1 << 31:
            example = 4 if kind != "geo" else 50
            raise ConfigError("ps", self.ps, f"{kind} takes a number of steps, {least} or more: ps={kind}:{example}")
        return Consistency(cast(Kind, kind), int(text))


_DEFAULTS: Final = {
    "aggregate": None,
    "dense": "server",
    "ps_values": "fp32",
    "not_finite": "reject",
    "lease_samples": None,
}
