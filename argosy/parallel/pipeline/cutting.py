"""A model that is to be cut: where, and what then crosses the cuts. What all kinds of pipelines share.

All workers follow the model by its shapes, and find the same places. The first worker times the pieces between them and
tells the others where to cut, so that all cut alike.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from argosy.config import ConfigError
from argosy.parallel.pipeline.cost import counted, measured
from argosy.parallel.pipeline.gate import Gate
from argosy.parallel.pipeline.ghost import Ghost, signature
from argosy.parallel.pipeline.layers import find_layers
from argosy.parallel.pipeline.micro_batches import MicroBatch
from argosy.parallel.pipeline.partition import partition
from argosy.parallel.pipeline.parts import Held, Parts, hold
from argosy.parallel.pipeline.stage_module import StageModule
from argosy.parallel.pipeline.trace import Meta, Trace, trace

_INSTEAD = (
    "under pipeline parallelism no worker has the whole model: train with fleet.step(x, y, loss_fn) instead of "
    "model(x), loss.backward() and optimizer.step()"
)
_TRACES_KEPT = 64


class Cutting:
    """A model, its layers and its gates, before and after it is cut."""

    def __init__(self, model: nn.Module, named: Sequence[str]) -> None:
        self.model, self._named = model, list(named)
        self.ghost = Ghost(model)
        self.layers = find_layers(model, named)
        self.gate = Gate(model, self.layers, _INSTEAD)
        self.has_numbers = all(parameter.device.type != "meta" for parameter in model.parameters())
        self._traces: OrderedDict[Hashable, Trace] = OrderedDict()

    def seen(self, part: MicroBatch) -> Trace:
        """How a micro-batch of these shapes goes through the model."""
        key = (self.model.training, signature((part.args, part.kwargs)))
        if key not in self._traces:
            self.ghost.follow(self.model)
            self._traces[key] = trace(self.ghost, self.layers, part.args, part.kwargs)
            while len(self._traces) > _TRACES_KEPT:
                self._traces.popitem(last=False)
        return self._traces[key]

    def check(self, part: MicroBatch, stages: int) -> None:
        """Refuse a model that cannot be cut into so many stages, or not where the user said."""
        if hasattr(self.model, "_orig_mod"):
            raise ConfigError("pipeline", stages, "a model that is compiled cannot be cut: distribute the model itself")
        seen = self.seen(part)
        possible = [call.name for call in seen.cuts]
        for name in self._named:
            if name not in possible:
                why = next(
                    (call.why_not for call in seen.calls if call.name == name),
                    "it is not called in forward (of a list, name a member)",
                )
                fix = f"no stage can begin at {name}: {why}; it can at {_listed(possible)}"
                raise ConfigError("split", ",".join(self._named), fix)
        order = [name for name in possible if name in self._named]
        if order != self._named:
            raise ConfigError(
                "split", ",".join(self._named), f"the model calls them in another order: {','.join(order)}"
            )
        if len(possible) + 1 < stages:
            raise ConfigError(
                "pipeline",
                stages,
                f"a model is cut into {stages} stages at {stages - 1} modules, and in {type(self.model).__name__} a "
                f"stage can begin at {_listed(possible)}. It must be given all that was computed before and is needed "
                f"later: make the middle of the model a chain, x = block(x), of enough blocks{_refusals(seen)}",
            )

    def choose(self, part: MicroBatch, workers: Sequence[int]) -> dict[str, Any]:
        """Where to cut for stages with so many workers each, and what the stages cost: on the first worker."""
        seen = self.seen(part)
        if self.has_numbers:
            costs = measured(self.model, self.gate, seen, part.args, part.kwargs)
        else:
            costs = counted({name: tensor.numel() for name, tensor in self.ghost.named.items()}, seen)
        names = [call.name for call in seen.cuts]
        named = [names.index(name) + 1 for name in self._named]
        begins = named or partition(costs, workers)
        edges = [0, *begins, len(costs)]
        shares = [sum(costs[begin:end]) for begin, end in itertools.pairwise(edges)]
        return {
            "cuts": [names[begin - 1] for begin in begins],
            "shares": [share / sum(costs) for share in shares],
            "by": "time" if self.has_numbers else "parameters",
            "has_numbers": self.has_numbers,
        }

    def apply(
        self, chosen: dict[str, Any], part: MicroBatch, mine: Sequence[int], fill: Callable[[Tensor], object]
    ) -> tuple[Parts, Held]:
        """Cut; this worker holds these stages from now on. `fill` broadcasts from the first worker; all call it."""
        parts = Parts.of(self.seen(part), chosen["cuts"])
        return parts, hold(self.model, self.ghost, parts.held_by(mine), fill, chosen["has_numbers"])

    def stages(self, parts: Parts, mine: Sequence[int], part: MicroBatch) -> list[StageModule]:
        """The stages of this worker as modules, in order. If it has one only, all that the model has left is in it."""
        seen = self.seen(part)
        begins = [seen.at(name).time for name in parts.cuts]
        owned: dict[int, list[nn.Module]] = {stage: [] for stage in mine}
        if len(mine) == 1:
            owned[mine[0]].append(self.model)
        else:
            called = {call.name: bisect.bisect_right(begins, call.time) for call in reversed(seen.calls)}
            names = {id(parameter): name for name, parameter in self.model.named_parameters()}
            for name, layer in self.layers.items():
                stage = called.get(name)
                if stage not in owned:  # a layer of others that has a tied parameter of ours
                    held = [parts.stages_of[names[id(parameter)]] for parameter in layer.parameters()]
                    stage = next((each for holders in held for each in holders if each in owned), None)
                if stage is not None:
                    owned[stage].append(layer)
        travels = {name: seen.at(name).travels for name in parts.cuts}
        return [
            StageModule(
                self.model, owned[stage], parts.held_by([stage]), self.gate, self.ghost, parts.bounds(stage), travels
            )
            for stage in mine
        ]

    def crossing(self, cut: str | None, part: MicroBatch) -> tuple[Meta, ...]:
        """The shapes of what crosses a cut; nothing crosses the ends of the model."""
        return () if cut is None else self.seen(part).at(cut).metas

    def table(self, chosen: dict[str, Any], parts: Parts, part: MicroBatch, where: Mapping[int, str]) -> list[str]:
        """The stages, for the user: which layers, on whom, and their share of the cost."""
        seen = self.seen(part)
        names = list(dict.fromkeys(call.name for call in seen.calls))
        begins = [0, *(names.index(cut) for cut in parts.cuts), len(names)]
        lines = []
        for stage, share in enumerate(chosen["shares"]):
            inside = names[begins[stage] : begins[stage + 1]]
            span = inside[0] if len(inside) == 1 else f"{inside[0]} .. {inside[-1]}"
            tied = sum(1 for holders in parts.stages_of.values() if stage in holders and len(holders) > 1)
            more = f", {tied} tied" if tied else ""
            lines.append(f"  stage {stage} on {where[stage]}: {span}, {share:.0%} of the {chosen['by']}{more}")
        return lines


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "no module at all"


def _refusals(seen: Trace) -> str:
    told = [f"not at {call.name}: {call.why_not}" for call in seen.calls if call.why_not and call.travels]
    return f" ({'; '.join(told[:3])})" if told else ""
