"""Buckets of gradients: which parameters share one, and the order in which they are started."""

from __future__ import annotations

from torch import nn

from argosy.comm.group import SoloGroup
from argosy.parallel.buckets import lay_out


def names(model: nn.Module, most_bytes: int = 1 << 20) -> list[list[str]]:
    """The buckets of a model whose gradients come as backward makes them: the last layer's first."""
    fillings = lay_out(list(reversed(list(model.named_parameters()))), SoloGroup(), most_bytes)
    return [[place.name for place in filling.places] for filling in fillings]


def test_biases_that_come_until_the_end_do_not_hold_up_large_gradients() -> None:
    model = nn.Sequential(*(nn.Linear(600, 600) for _ in range(3)))
    assert names(model) == [["2.weight"], ["1.weight"], ["2.bias", "1.bias", "0.bias"], ["0.weight"]]


def test_a_bucket_that_is_full_goes_before_what_comes_later() -> None:
    model = nn.Sequential(nn.Linear(600, 600), *(nn.Linear(100, 100, bias=False) for _ in range(3)))
    assert names(model, most_bytes=80_000) == [["3.weight", "2.weight"], ["1.weight", "0.bias"], ["0.weight"]]


def test_types_do_not_share_a_bucket() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10).double(), nn.Linear(10, 10))
    assert names(model) == [["1.bias", "1.weight"], ["2.bias", "2.weight", "0.bias", "0.weight"]]
