"""Checking that all workers hold the same thing, before a difference becomes a hang or garbage."""

from __future__ import annotations

import hashlib
import itertools

import torch

from argosy.comm.group import Group


def check_agreement(what: str, lines: list[str], group: Group) -> None:
    """Raise on every worker unless all of them give the same lines; say where they first differ from rank 0's."""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    digests = group.all_gather(mine)
    odd = next((rank for rank, theirs in enumerate(digests) if not torch.equal(theirs, digests[0])), None)
    if odd is None:
        return
    first, other = (_told_by(rank, lines, group) for rank in (0, odd))
    pairs = itertools.zip_longest(first, other, fillvalue="nothing there")
    ours, theirs = next((a, b) for a, b in pairs if a != b)
    raise ValueError(f"{what} must be the same on all workers: rank 0 has [{ours}], rank {odd} has [{theirs}]")


def _told_by(rank: int, lines: list[str], group: Group) -> list[str]:
    return group.broadcast_bytes("\n".join(lines).encode() if group.rank == rank else None, rank).decode().split("\n")
