"""SGD's step where a gradient is zero but for a few numbers, and it is known where these are.

Once momentum and weight decay are applied before gradients are sent, what is left of SGD is p -= lr * g. After DGC all
but one or two in a thousand numbers of g are zero. To read them all, and as many parameters, takes as long as DGC
itself; so only places that a worker has sent something for are read and changed.

[Note: a gradient that was changed]
Between backward and the step, `p.grad` is the script's: it may clip, mask, or add to it. Numbers are read from `p.grad`
itself, so a change where something was sent counts. Whether others may have changed is told by the tensor's version,
which all of torch's operations raise; and since what goes through `p.grad.data` or NumPy does not, every 509th number
is looked at. If either tells of a change, the whole gradient counts, as it would have anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from argosy._native import sparse_descend


@dataclass(frozen=True)
class Landed:
    """Where the numbers of a gradient are: the gaps of all workers' messages, by worker, and the sum as it was then."""

    gaps: Tensor
    address: int
    version: int

    @classmethod
    def of(cls, total: Tensor, gaps: Tensor) -> Landed:
        """For a sum that was just made."""
        return cls(gaps.clone(), total.data_ptr(), total._version)

    def is_whole(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter's gradient is what has landed, as far as torch knows."""
        gradient = parameter.grad
        return (
            gradient is not None
            and (gradient.data_ptr(), gradient._version) == (self.address, self.version)
            and gradient.is_contiguous()
            and parameter.is_contiguous()
            and parameter.dtype == torch.float32
        )

    def descend(self, parameter: nn.Parameter, rate: float) -> bool:
        """Make SGD's step of a parameter; returns whether it was enough to look where numbers have landed."""
        messages, entries = self.gaps.shape
        gradient = parameter.grad
        assert gradient is not None
        with torch.no_grad():
            if self.is_whole(parameter) and sparse_descend(
                parameter.data_ptr(),
                gradient.data_ptr(),
                parameter.numel(),
                rate,
                self.gaps.data_ptr(),
                entries,
                messages,
            ):
                increment_version(parameter)
                return True
            parameter.add_(gradient, alpha=-rate)
        return False
