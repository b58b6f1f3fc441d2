"""A worker without a share of the last step gets an empty batch."""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from loader_harness import Job
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    DataLoader,
)

# A worker without a share.


class Sample(NamedTuple):
    image: Tensor
    label: int


def nested(number: int) -> dict[str, Any]:
    return {
        "image": torch.full((3, 4), number),
        "pair": (number, 0.5),
        "name": f"n{number}",
        "sample": Sample(torch.ones(2), 1),
    }


def test_an_empty_share_is_an_empty_batch_of_the_right_shape() -> None:
    job = Job(4, lambda: DataLoader([nested(number) for number in range(5)], 1))
    first, *others = job.shares()
    assert first[1]["name"] == ["n4"]
    for full, empty in others:
        assert empty["name"] == []
        assert (empty["image"].shape, empty["image"].dtype) == ((0, 3, 4), full["image"].dtype)
        assert [(part.shape, part.dtype) for part in empty["pair"]] == [((0,), part.dtype) for part in full["pair"]]
        assert type(empty["sample"]) is Sample
        assert (empty["sample"].image.shape, empty["sample"].label.shape) == ((0, 2), (0,))


def last_share_of_two_workers(collate: Callable[[list[Any]], Any]) -> Any:
    """What the second worker is given in a step of one sample."""
    dataset = [(torch.ones(3, 2), number) for number in range(3)]
    return Job(2, lambda: DataLoader(dataset, 1, collate_fn=collate)).shares()[1][-1]


def test_a_batch_of_arrays_is_emptied() -> None:
    x, y = last_share_of_two_workers(lambda samples: tuple(map(np.stack, zip(*samples, strict=True))))
    assert (x.shape, y.shape) == ((0, 3, 2), (0,))


@pytest.mark.parametrize(
    ("collate", "empty"),
    [
        (lambda samples: [label for _, label in samples], []),
        (lambda samples: tuple(zip(*samples, strict=True)), ((), ())),
    ],
    ids=["list of samples", "lists of parts"],
)
def test_a_batch_of_lists_of_samples_is_emptied(collate: Callable[[list[Any]], Any], empty: Any) -> None:
    assert last_share_of_two_workers(collate) == empty


def test_what_is_not_of_a_sample_stays_in_an_empty_batch() -> None:
    fixed = {"mask": None, "task": "digits", "scale": 0.5, "width": 28}
    batch = last_share_of_two_workers(lambda samples: {"x": torch.stack([x for x, _ in samples]), **fixed})
    assert batch.pop("x").shape == (0, 3, 2)
    assert batch == fixed


@pytest.mark.parametrize("kind", [collections.OrderedDict, collections.UserDict])
def test_an_empty_batch_keeps_its_kind(kind: type[Any]) -> None:
    batch = last_share_of_two_workers(lambda samples: kind(x=torch.stack([x for x, _ in samples])))
    assert type(batch) is kind
    assert batch["x"].shape == (0, 3, 2)


def test_a_batch_that_cannot_be_emptied_is_refused_with_the_way_out() -> None:
    with pytest.raises(TypeError, match=r"type object .*drop_last=True"):
        last_share_of_two_workers(lambda samples: object())


def test_a_batch_whose_first_dimension_is_time_is_emptied_along_the_second() -> None:
    def padded(samples: list[Any]) -> dict[str, Any]:
        words = [torch.ones(2 + number % 3, 4) for number, _ in enumerate(samples)]
        return {"words": pad_sequence(words), "lengths": torch.tensor([len(word) for word in words])}

    batch = last_share_of_two_workers(padded)
    assert batch["words"].shape[1:] == (0, 4)
    assert batch["lengths"].shape == (0,)
