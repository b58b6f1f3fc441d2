"""Sparse gradients (`nn.Embedding(sparse=True)`): the rows that any worker has used, gathered and added up."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from argosy.comm.engine import EngineGroup


@torch.no_grad()
def sum_sparse(parameter: nn.Parameter, weight: float, group: EngineGroup) -> None:
    """Replace a sparse gradient by the sum over all workers, each times its weight. Who has none adds nothing.

    Entries are padded to the longest list, gathered by rank and added in that order: the same bits on all workers.
    """
    indices, values = _entries(parameter, weight)
    counts = [int(count) for count in group.all_gather(torch.tensor([values.shape[0]]))]
    longest = max(counts)
    if longest == 0:
        parameter.grad = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
        return
    padded_indices = indices.new_zeros(1, longest)
    padded_indices[:, : indices.shape[1]] = indices
    padded_values = values.new_zeros(longest, *values.shape[1:])
    padded_values[: values.shape[0]] = values
    all_indices = [each[:, :count] for each, count in zip(group.all_gather(padded_indices), counts, strict=True)]
    all_values = [each[:count] for each, count in zip(group.all_gather(padded_values), counts, strict=True)]
    whole = torch.sparse_coo_tensor(
        torch.cat(all_indices, 1), torch.cat(all_values), parameter.shape, check_invariants=False
    )
    parameter.grad = whole.coalesce().to(parameter.device)


def _entries(parameter: nn.Parameter, weight: float) -> tuple[Tensor, Tensor]:
    """Where this worker's gradient is not zero, and what it is there, weighted."""
    grad = parameter.grad
    if grad is None or not weight:
        row = parameter.shape[1:]
        return torch.zeros(1, 0, dtype=torch.long), torch.zeros(0, *row, dtype=parameter.dtype)
    grad = grad.coalesce().cpu()
    return grad.indices(), grad.values() * weight
