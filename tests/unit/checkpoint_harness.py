"""What the tests of checkpoints share."""

from pathlib import Path
from typing import Any

import torch
from kept_states import read, write
from torch import Tensor

State = dict[str, Any]


def assert_same(ours: Any, theirs: Any) -> None:
    """The same values of the same types, tensors bit for bit."""
    if isinstance(ours, Tensor):
        assert isinstance(theirs, Tensor)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        torch.testing.assert_close(ours.detach(), theirs, rtol=0, atol=0, equal_nan=True)
    elif isinstance(ours, dict):
        assert isinstance(theirs, dict)
        assert [(type(key), key) for key in ours] == [(type(key), key) for key in theirs]
        for key in ours:
            assert_same(ours[key], theirs[key])
    elif isinstance(ours, (list, tuple)):
        assert type(ours) is type(theirs)
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other)
    else:
        assert type(ours) is type(theirs)
        assert repr(ours) == repr(theirs)  # so that NaN is NaN, and -0.0 is not 0.0


def again(folder: Path, state: Any) -> Any:
    write(folder, {"model": state})
    return read(folder)["model"]


BASE = torch.arange(24.0).reshape(4, 6)
COMPLEX = torch.complex(BASE, BASE + 1)
STRANGE = {
    "transposed": BASE.t(),
    "every other": BASE[::2, 1::3],
    "a view of a part": BASE[1:3],
    "expanded": torch.arange(3.0).expand(5, 3),
    "a number": torch.tensor(2.5),
    "a number of many": BASE[1, 2],
    "empty": torch.empty(0, 3),
    "bool": BASE > 5,
    "bfloat16": BASE.to(torch.bfloat16),
    "float16": BASE.to(torch.float16),
    "float64": BASE.double() / 3,
    "int64": torch.tensor([-(2**63), 2**63 - 1]),
    "uint8": BASE.to(torch.uint8),
    "not finite": torch.tensor([float("nan"), float("inf"), -0.0]),
    "complex": COMPLEX,
    "conjugate": COMPLEX.conj(),
    "imaginary part of a conjugate": COMPLEX.conj().imag,
    "needs a gradient": BASE.clone().requires_grad_(),
}
