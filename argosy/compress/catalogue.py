"""From what a strategy says to the codec that does it. Each is imported only where it is used."""

from __future__ import annotations

from argosy.compress.codec import Codec
from argosy.compress.config import CompressConfig

# What these have held back is of one kind, and serves any of them.
_RESIDUALS = frozenset({"int8", "int4", "sign", "powersgd"})


def can_take(config: CompressConfig, kept_by: str) -> bool:
    """Whether the chosen codec can go on with what the codec of a checkpoint, `compress=kept_by`, has kept.

    >>> can_take(CompressConfig(compress="int8"), "powersgd:4"), can_take(CompressConfig(compress="dgc"), "int8")
    (True, False)
    """
    (name, _), theirs = config.codec(), kept_by.partition(":")[0]
    return name == theirs or {name, theirs} <= _RESIDUALS


def make_codec(config: CompressConfig) -> Codec | None:
    """The codec that was chosen, or None for `compress=none`.

    >>> type(make_codec(CompressConfig(compress="topk:0.05"))).__name__
    'TopKCodec'
    """
    name, number = config.codec()
    match name:
        case "none":
            return None
        case "fp16" | "bf16":
            from argosy.compress.half import HalfCodec

            return HalfCodec("fp16" if name == "fp16" else "bf16")
        case "int8" | "int4":
            from argosy.compress.quantised import QuantisedCodec

            return QuantisedCodec(bits=8 if name == "int8" else 4)
        case "sign":
            from argosy.compress.sign import SignCodec

            return SignCodec()
    assert number is not None  # the others take one, and have a default
    match name:
        case "topk":
            from argosy.compress.topk import TopKCodec

            return TopKCodec(number)
        case "powersgd":
            from argosy.compress.powersgd import PowerSgdCodec

            return PowerSgdCodec(rank=int(number))
        case "dgc":
            from argosy.compress.dgc import DgcCodec

            return DgcCodec(number, config.dgc_warmup_epochs, config.dgc_clip)
    raise AssertionError(f"{name} is in CODECS and not here")
