"""Buffers: what a model keeps beside its parameters, and changes as it sees its worker's samples.

Running statistics, moving averages and the like drift apart on workers that see different samples. Those that have
changed since they were last the same are brought together again with the gradients: floating-point ones by the mean,
weighted by samples, others by taking rank 0's. Those that have not changed are left alone: a mean of equal numbers is
not always that number.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class Buffers:
    """The buffers of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.note()

    def all(self) -> list[Tensor]:
        """Every buffer that may drift. Layers count their batches alike on all workers: that need not be told."""
        counters = {id(layer.num_batches_tracked) for layer in self._norm_layers()}
        return [buffer for buffer in self._model.buffers() if id(buffer) not in counters]

    def changed(self) -> list[bool]:
        """Which of them have changed here since `note`. Running statistics change without a new version."""
        learning = [layer for layer in self._norm_layers() if layer.training]
        running = {id(value) for layer in learning for value in (layer.running_mean, layer.running_var)}
        return [id(b) in running or (id(b), b._version) not in self._known for b in self.all()]

    def _norm_layers(self) -> list[_NormBase]:
        return [module for module in self._model.modules() if isinstance(module, _NormBase)]

    def note(self) -> None:
        """They are the same on all workers now."""
        self._known = {(id(buffer), buffer._version) for buffer in self.all()}
