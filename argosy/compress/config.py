"""What a user may choose about compression."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from argosy.config import Config, ConfigError

# For each codec the meaning of what may follow a colon, its default, and what it may be.
_Argument = tuple[str, float, Callable[[float], bool], str]
CODECS: Final[dict[str, _Argument | None]] = {
    "none": None,
    "fp16": None,
    "bf16": None,
    "int8": None,
    "int4": None,
    "sign": None,
    "topk": ("the fraction that is sent", 0.01, lambda value: 0 < value <= 1, "a fraction such as topk:0.01"),
    "powersgd": ("the rank", 4.0, lambda value: value >= 1 and value.is_integer(), "a whole number: powersgd:4"),
    "dgc": ("the final sparsity", 0.999, lambda value: 0 <= value < 1, "a fraction such as dgc:0.999"),
}


@dataclass(frozen=True)
class CompressConfig(Config):
    """How gradients travel: `compress=dgc`, or with a number, `compress=powersgd:4`.

    `dgc_warmup_epochs`: over how many epochs DGC's sparsity rises to its final value; 0 begins there.
    `dgc_clip`: the threshold that local gradients are clipped to, times the number of workers to the power -1/2.

    >>> CompressConfig(compress="powersgd:2").codec(), CompressConfig(compress="powersgd").codec()
    (('powersgd', 2.0), ('powersgd', 4.0))
    """

    compress: str = "none"
    dgc_warmup_epochs: int = 4
    dgc_clip: float | None = None

    def check(self) -> None:
        """Refuse codecs that there are not, and options of one that is not used."""
        name, argument = self.codec()
        rule = CODECS[name]
        if rule is not None and argument is not None and not rule[2](argument):
            raise ConfigError("compress", self.compress, f"{rule[0]} is {rule[3]}")
        if self.dgc_warmup_epochs < 0:
            raise ConfigError("dgc_warmup_epochs", self.dgc_warmup_epochs, "epochs are counted from 0")
        if self.dgc_clip is not None and self.dgc_clip <= 0:
            raise ConfigError("dgc_clip", self.dgc_clip, "a threshold is above 0; leave it out to clip nothing")
        changed = self.dgc_warmup_epochs != 4 or self.dgc_clip is not None
        if changed and name != "dgc":
            raise ConfigError("compress", self.compress, "dgc_warmup_epochs and dgc_clip are for compress=dgc")

    def codec(self) -> tuple[str, float | None]:
        """The codec's name, and its number if it takes one."""
        name, colon, text = self.compress.partition(":")
        if name not in CODECS:
            raise ConfigError("compress", self.compress, f"expected one of {', '.join(CODECS)}")
        rule = CODECS[name]
        if rule is None:
            if colon:
                raise ConfigError("compress", self.compress, f"{name} takes no number")
            return name, None
        if not colon:
            return name, rule[1]
        try:
            return name, float(text)
        except ValueError:
            raise ConfigError("compress", self.compress, f"{rule[0]} is {rule[3]}") from None
