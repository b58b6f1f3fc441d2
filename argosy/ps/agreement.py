"""Checking that all workers open the same tables, before servers find two that differ and know no names."""

from __future__ import annotations

import dataclasses

from torch import nn

from argosy.comm.agree import check_agreement
from argosy.comm.group import Group
from argosy.ps.tables import embeddings


def check_tables(model: nn.Module, group: Group) -> None:
    """Raise on every worker unless a model has the same tables on all; say which field of which table differs."""
    specs = (dataclasses.replace(each.spec, name=each.spec.name or place) for place, each in embeddings(model))
    check_agreement(f"the tables of {type(model).__name__}", [line for spec in specs for line in spec.lines()], group)
