"""Blockwise quantised all-reduce: gradients of 8 or 4 bits on the wire, with error feedback.

Numbers are quantised in blocks (256 of 8 bits, 128 of 4), each with a scale of its own: its largest magnitude. Worker r
owns part r of a bucket. Each worker quantises the other parts of its share and sends them to their owners; an owner
adds them to its own share, quantises the sum, and sends that to all. So a number is quantised twice at most, however
many workers there are, and all read the same records: the owner too, or its bits would differ.

What rounding leaves out of a share stays with its worker. What it leaves out of the sum stays with the owner. As the
sum over workers is what is wanted, it makes no difference whose next share it comes back with.

A number that is not finite makes its block NaN on all workers, and what its worker and the owner had held back of that
block is dropped: see [Note: records] in csrc/codec_quant_types.h.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from argosy._native import dequantise, quantise, quantised_record
from argosy.comm.engine import EngineGroup
from argosy.comm.pending import Pending
from argosy.compress.codec import Bucket, Codec
from argosy.compress.kept import Residuals, Scratch, address_of


class QuantisedCodec(Codec):
    """Sums gradients as codes of `bits` bits, 8 or 4."""

    def __init__(self, bits: Literal[4, 8]) -> None:
        super().__init__()
        if bits not in (4, 8):
            raise ValueError(f"bits={bits}: gradients are quantised with 8 or 4 bits")
        self._bits = bits
        self._block, self._record_bytes = quantised_record(bits)
        self._residuals, self._scratch = Residuals(), Scratch()

    def steps(self, bucket: Bucket, group: EngineGroup) -> Iterator[Pending]:
        """Quantise, exchange, add up, quantise again, exchange: see above."""
        bits, count, rank, size = self._bits, bucket.flat.numel(), group.rank, group.size
        if not count:
            return
        blocks = -(-count // (self._block * size))
        part_bytes = blocks * self._record_bytes
        cuts = [min(owner * blocks * self._block, count) for owner in range(size + 1)]
        share, residual = address_of(bucket), self._residuals.of(bucket).data_ptr()

        with self._scratch.lend(group) as rooms:
            sent = rooms.take("sent", (size - 1) * part_bytes, torch.uint8)
            received = rooms.take("received", (size - 1) * part_bytes, torch.uint8)
            own = rooms.take("own", part_bytes, torch.uint8)
            whole = rooms.take("whole", size * part_bytes, torch.uint8)
            self.bytes_sent += sent.nbytes + own.nbytes

            records = sent.data_ptr()
            for owner in range(size):
                if owner != rank:
                    begin, part = 4 * cuts[owner], cuts[owner + 1] - cuts[owner]
                    quantise(bits, records, share + begin, residual + begin, part)
                    records += part_bytes
            splits = [part_bytes if owner != rank else 0 for owner in range(size)]
            yield group.all_to_all(received, sent, splits, splits, wait=False)

            begin, part = 4 * cuts[rank], cuts[rank + 1] - cuts[rank]
            sources = [received.data_ptr() + number * part_bytes for number in range(size - 1)]
            dequantise(bits, share + begin, sources, part, True)
            quantise(bits, own.data_ptr(), share + begin, residual + begin, part)
            yield group.all_gather_into(whole, own, wait=False)
            dequantise(bits, share, [whole.data_ptr()], count)

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
