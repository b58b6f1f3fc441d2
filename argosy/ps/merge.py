"""Gradients of several batches, or of several uses of one table, as one."""

from __future__ import annotations

import torch
from torch import Tensor

from argosy.ps.lookup import Lookup
from argosy.ps.store import Gradients


def merged(several: list[Gradients]) -> Gradients:
    """The sum by id.

    >>> one, two = torch.tensor([1]), torch.tensor([2, 1])
    >>> shows = torch.ones(2, dtype=torch.int32)
    >>> both = merged([Gradients(one, torch.ones(1, 1), shows[:1]), Gradients(two, torch.ones(2, 1), shows)])
    >>> both.ids.tolist(), both.rows.tolist(), both.shows.tolist()
    ([1, 2], [[2.0], [1.0]], [2, 1])
    """
    if len(several) == 1:
        return several[0]
    lookup = Lookup.of(torch.cat([each.ids for each in several]))
    shows, clicks = counted(several, lookup)
    pulled = None
    if several[0].pulled is not None:
        pulled = torch.empty(len(lookup.ids), several[0].rows.shape[1])
        pulled[lookup.places.long()] = torch.cat([each.pulled for each in several if each.pulled is not None])
    return Gradients(lookup.ids, lookup.add_up(torch.cat([each.rows for each in several])), shows, clicks, pulled)


def counted(several: list[Gradients], lookup: Lookup) -> tuple[Tensor, Tensor | None]:
    """The shows and clicks of all, by the ids of `lookup`, which has theirs one behind the other."""
    shows = torch.zeros(len(lookup.ids), dtype=torch.int32)
    shows.index_add_(0, lookup.places.long(), torch.cat([each.shows for each in several]))
    if all(each.clicks is None for each in several):
        return shows, None
    parts = [torch.zeros(len(each.ids)) if each.clicks is None else each.clicks for each in several]
    return shows, lookup.add_up(torch.cat(parts)[:, None]).view(-1)
