"""Our plan of tensor parallelism, on torch's Gloo backend instead of ours."""

from __future__ import annotations

from torch_tensors import train_divided

from argosy.parallel.tensor.apply import tensor_parallel
from argosy.parallel.tensor.config import TensorConfig

train_divided(lambda model, mesh: tensor_parallel(model, mesh, TensorConfig()), foreach=True)
