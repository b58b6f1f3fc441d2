"""Gradients of one bit: their signs, and for every 64 the mean of their magnitudes (16 bits), with error feedback.

Every worker gets the signs of all (one all-gather) and adds them up, each times its scale. That is exact, and takes one
exchange. A worker receives 1.25 bits for each number from each other worker, so beyond some 50 of them it is no less
than the numbers themselves would be.

A number that is not finite makes its block NaN on all workers, and what was held back of that block is dropped: see
[Note: records] in csrc/codec_quant_types.h.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from argosy._native import dequantise, quantise, quantised_record
from argosy.comm.engine import EngineGroup
from argosy.comm.pending import Pending
from argosy.compress.codec import Bucket, Codec
from argosy.compress.kept import Residuals, Scratch, address_of


class SignCodec(Codec):
    """Sums the signs of gradients, times a scale for each worker and block."""

    def __init__(self) -> None:
        super().__init__()
        self._block, self._record_bytes = quantised_record(1)
        self._residuals, self._scratch = Residuals(), Scratch()

    def steps(self, bucket: Bucket, group: EngineGroup) -> Iterator[Pending]:
        """Exchange the signs, and add them up."""
        flat = bucket.flat
        if not flat.numel():
            return
        share, residual = address_of(bucket), self._residuals.of(bucket).data_ptr()
        size_bytes = -(-flat.numel() // self._block) * self._record_bytes
        with self._scratch.lend(group) as rooms:
            sent = rooms.take("sent", size_bytes, torch.uint8)
            received = rooms.take("received", group.size * size_bytes, torch.uint8)
            quantise(1, sent.data_ptr(), share, residual, flat.numel())
            self.bytes_sent += sent.nbytes
            yield group.all_gather_into(received, sent, wait=False)
            sources = [received.data_ptr() + rank * size_bytes for rank in range(group.size)]
            dequantise(1, share, sources, flat.numel())

    def meet(self, name: str, parameter: nn.Parameter) -> None:
        """Of a parameter that is new nothing was held back."""
        self._residuals.forget(name)

    def rescale(self, ratio: float) -> None:
        """What was held back is as large as it would have been."""
        self._residuals.rescale(ratio)

    def state_dict(self, group: EngineGroup) -> dict[str, Any]:
        """What was held back."""
        return {"residual": self._residuals.state_dict(group)}

    def load_state_dict(self, state: dict[str, Any], group: EngineGroup) -> None:
        """Take an equal part of it. What another codec held back is as good."""
        self._residuals.load_state_dict(state.get("residual", {}), group)
