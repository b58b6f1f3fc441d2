"""The codecs in plain torch, for all workers at once: what the native ones are tested against."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCKS = {8: 256, 4: 128, 1: 256}
MOST = {8: 127.0, 4: 7.0}
TINY = 2.0**-100


def quantise(values: Tensor, bits: int) -> Tensor:
    """What is left of numbers that are quantised in blocks."""
    block = BLOCKS[bits]
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % block)).view(-1, block)
    read = _signs(blocks, values.numel()) if bits == 1 else _integers(blocks, MOST[bits])
    read[~blocks.isfinite().all(1)] = torch.nan
    return read.view(-1)[: values.numel()]


def _integers(blocks: Tensor, most: float) -> Tensor:
    peak = blocks.abs().amax(1, keepdim=True)
    codes = torch.where(peak < TINY, torch.zeros(()), torch.round(blocks * (most / peak)))
    return codes * torch.where(peak < TINY, torch.zeros(()), peak / most)


def _signs(blocks: Tensor, count: int) -> Tensor:
    """A scale for every 64 numbers: the mean of their magnitudes, added up in the order of the kernels."""
    runs = blocks.view(-1, 8, 8)
    sums = torch.zeros(len(runs), 8)
    for number in range(8):
        sums = sums + runs[:, number].abs()
    while sums.shape[1] > 1:
        sums = sums[:, : sums.shape[1] // 2] + sums[:, sums.shape[1] // 2 :]
    numbers = (count - 64 * torch.arange(len(runs))).clamp(1, 64).float().view(-1, 1)
    halves = (sums / numbers).view(torch.int32).bitwise_and(-65536).view(torch.float32)
    return torch.copysign(halves.repeat_interleave(64), blocks.view(-1)).view_as(blocks)


def held_back(values: Tensor, bits: int) -> Tensor:
    """The rest; nothing of a block in which not all is finite."""
    return torch.nan_to_num(values - quantise(values, bits), nan=0.0)


def quantised_sum(shares: list[Tensor], residuals: list[Tensor], bits: int) -> Tensor:
    """The sum of 8 or 4 bits; `residuals` are changed in place."""
    size, count = len(shares), shares[0].numel()
    part = -(-count // (BLOCKS[bits] * size)) * BLOCKS[bits]
    result = torch.empty(count)
    for owner in range(size):
        place = slice(min(owner * part, count), min(owner * part + part, count))
        total = shares[owner][place].clone()
        if not total.numel():
            continue
        for rank in range(size):
            if rank != owner:
                sent = shares[rank][place] + residuals[rank][place]
                total += quantise(sent, bits)
                residuals[rank][place] = held_back(sent, bits)
        total += residuals[owner][place]
        result[place] = quantise(total, bits)
        residuals[owner][place] = held_back(total, bits)
    return result


def sign_sum(shares: list[Tensor], residuals: list[Tensor]) -> Tensor:
    """The sum of signs times their scales."""
    result = torch.zeros_like(shares[0])
    for share, residual in zip(shares, residuals, strict=True):
        sent = share + residual
        result += quantise(sent, 1)
        residual.copy_(held_back(sent, 1))
    return result


def powersgd_sum(shares: list[Tensor], residuals: list[Tensor], start: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of matrices, of rank len(start); also where the next step begins."""
    sent = [share + residual for share, residual in zip(shares, residuals, strict=True)]
    p = torch.linalg.qr(torch.stack([matrix @ start.T for matrix in sent]).sum(0)).Q
    own = [matrix.T @ p for matrix in sent]
    for residual, matrix, q in zip(residuals, sent, own, strict=True):
        residual.copy_(matrix - p @ q.T)
    q = torch.stack(own).sum(0)
    return p @ q.T, q.T.contiguous()


def half_sum(shares: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of numbers of 16 bits, rounded once more; fp16 in a range that all workers' largest number gives."""
    scale = torch.tensor(1.0)
    if dtype == torch.float16:
        bound = max(float(share.abs().max()) for share in shares) * len(shares)
        scale = torch.tensor(2.0) ** (15 - math.frexp(bound)[1])
    rounded = [(share * scale).to(dtype).float() for share in shares]
    return torch.stack(rounded).sum(0).to(dtype).float() / scale
