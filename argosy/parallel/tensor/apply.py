"""Making a plan true: a model's parameters are divided, and its modules compute with their parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from argosy.parallel.tensor.attention import multihead
from argosy.parallel.tensor.config import TensorConfig
from argosy.parallel.tensor.crossing import plain
from argosy.parallel.tensor.layers import Forward, column, row, vocabulary, whole
from argosy.parallel.tensor.place import place
from argosy.parallel.tensor.plan import Plan, make_plan
from argosy.parallel.tensor.randomness import Tracker, begin_together
from argosy.parallel.tensor.region import Region
from argosy.parallel.tensor.rules import Rules
from argosy.parallel.tensor.styles import Style


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, config: TensorConfig) -> TensorParallel:
    """Divide a model among the ranks of a mesh of one dimension, in place; all of them call this.

    All its parameters become DTensors on the mesh. `model(x)` takes and gives plain tensors as before, the same on
    all ranks.
    """
    return TensorParallel(model, mesh, make_plan(model, mesh.size(), config), config)


class TensorParallel:
    """A divided model."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, plan: Plan, config: TensorConfig) -> None:
        self.model, self.mesh, self.plan = model, mesh, plan
        self._region = Region(mesh, config.sequence_parallel)
        self._rules = Rules(self._region)
        self._computing = False
        self._before: dict[nn.Module, Forward | None] = {}  # the forward that a module had of its own, if any
        self._flags: list[tuple[nn.Module, str, Any]] = []
        begin_together(mesh)
        place(plan, mesh)
        self._tracker = Tracker.installed(mesh) if mesh.device_type == "cpu" else None
        for name, style in plan.styles.items():
            module = model.get_submodule(name)
            self._replace(module, self._computes(self._forward(name, module, style)))
        self._avoid_native_paths()
        for module in self._containers():
            self._replace(module, self._computes(module.forward, outermost=module is model))

    def lines(self) -> list[str]:
        """The plan for the user."""
        return self.plan.lines()

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """In this block the model's output stays divided, and losses are computed so, as in `loss_fn(model(x), y)`.

        Cross-entropy gives a plain tensor; of any other loss `whole(loss)` makes one.
        """
        with self._by_the_rules():
            yield

    def whole(self, output: Any) -> Any:
        """An output or a loss, as plain tensors."""
        return tree_map_only(Tensor, plain, output)

    def close(self) -> None:
        """Leave the model: its modules compute as they are written. Calling it twice is harmless."""
        if not self._before:
            return
        for module, forward in self._before.items():
            module.__dict__.pop("forward", None)
            if forward is not None:
                object.__setattr__(module, "forward", forward)
        for module, name, value in self._flags:
            setattr(module, name, value)
        self._before, self._flags = {}, []
        if self._tracker is not None:
            self._tracker.remove()

    def _forward(self, name: str, module: nn.Module, style: Style) -> Forward:
        region = self._region
        if style.kind == "column":
            assert isinstance(module, nn.Linear)
            return column(module, style.parts, region, name)
        if style.kind == "row":
            assert isinstance(module, nn.Linear)
            return row(module, region, name)
        if style.kind == "vocab":
            assert isinstance(module, nn.Embedding)
            return vocabulary(module, region, name)
        if style.kind == "heads":
            assert isinstance(module, nn.MultiheadAttention)
            return multihead(module, region, name)
        owners = [module, module.out_proj] if isinstance(module, nn.MultiheadAttention) else [module]
        return whole(owners, module.forward)

    def _replace(self, module: nn.Module, forward: Forward) -> None:
        self._before.setdefault(module, module.__dict__.get("forward"))
        object.__setattr__(module, "forward", forward)

    def _containers(self) -> list[nn.Module]:
        """The model and whatever in it holds divided modules."""
        divided = [name for name, style in self.plan.styles.items() if style.kind != "replicate"]
        names = {name.rsplit(".", level)[0] for name in divided for level in range(1, name.count(".") + 1)}
        return [self.model, *(module for name, module in self.model.named_modules() if name in names)]

    def _computes(self, forward: Forward, *, outermost: bool = False) -> Forward:
        """A forward by the rules. Each module's is one: each may be what is computed again in backward, by itself."""

        def replaced(*arguments: Any, **keywords: Any) -> Any:
            if self._computing:
                return forward(*arguments, **keywords)
            with self._by_the_rules():
                output = forward(*arguments, **keywords)
                return self.whole(output) if outermost else output

        return replaced

    @contextmanager
    def _by_the_rules(self) -> Iterator[None]:
        if self._computing:
            yield
            return
        self._computing = True
        try:
            with self._rules:
                yield
        finally:
            self._computing = False
            self._region.forget()

    def _avoid_native_paths(self) -> None:
        """torch's encoder layers have paths, when they evaluate, that read parameters past their modules."""
        for module in self.model.modules():
            if isinstance(module, nn.TransformerEncoderLayer):
                self._set(module, "activation_relu_or_gelu", 0)
            elif isinstance(module, nn.TransformerEncoder):
                self._set(module, "use_nested_tensor", False)

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        self._flags.append((module, name, getattr(module, name)))
        setattr(module, name, value)
