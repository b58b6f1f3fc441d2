"""The reducer: sums the gradients of all workers, bucket by bucket, while backward goes on.

[Note: the same order everywhere]
Operations of a group must be started in the same order by all its members. Buckets have a fixed order, that in which
rank 0's first backward pass filled them. A bucket is started when it and all before it are full; those that
are not full when backward ends are started then, with zeros for what is absent. So it does not matter which parameters
a worker has used: all start the same operations, and none waits for a gradient that never comes.

[Note: whose time]
Without a codec a bucket is handed to the engine. Its thread takes it when backward leaves it time, and what is left
when backward ends runs in the thread that waits. A codec computes between its exchanges, so the reducer runs it on a
thread of its own (`turns.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from argosy.comm.engine import EngineGroup
from argosy.comm.pending import Pending
from argosy.compress.codec import Codec
from argosy.parallel.buckets import Filling, Place, lay_out
from argosy.parallel.turns import Turns


class Reducer:
    """The buckets of one model's gradients."""

    def __init__(
        self,
        group: EngineGroup,
        codec: Codec | None,
        bucket_bytes: int,
        overlap: bool = True,
        accumulates: bool = False,
    ) -> None:
        """`overlap=False` starts nothing before backward has ended; `accumulates` if buckets keep sums meanwhile."""
        self._group, self._codec, self._bucket_bytes, self.overlap = group, codec, bucket_bytes, overlap
        self._accumulates = accumulates
        self._thread = ThreadPoolExecutor(1, "argosy codec") if codec is not None else None
        self._turns = Turns()  # that thread's
        self._fillings: list[Filling] = []
        self._places: dict[nn.Parameter, tuple[Filling, Place]] = {}
        self.places: list[Place] = []  # of all parameters, in the order of the buckets
        self._arrivals: list[nn.Parameter] | None = []  # of the first pass, in order; None when the order is settled
        self._started: list[Callable[[], object]] = []  # what to call to wait for each bucket
        self._averages = False

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()

    def lay_out(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Make buckets for these parameters. Before a first pass has shown the order, the last ones come first."""
        fits = all(place.dtype == place.parameter.dtype for place in self.places)
        if fits and {(place.name, place.parameter) for place in self.places} == set(named):
            return
        held = {place.parameter: place.view.clone() for place in self.places if place.holds}
        self._make(list(reversed(named)))
        for place in self.places:  # another parameter was unfrozen while batches are being added up
            if place.parameter in held:
                place.view.copy_(held[place.parameter])
                place.holds = True
        self._arrivals = []

    def has(self, parameter: Tensor) -> bool:
        """Whether a bucket has a place for it."""
        return parameter in self._places

    def add(self, parameter: nn.Parameter, weight: float | None, last: bool) -> None:
        """A gradient has come; `last` if its sum is wanted in this pass, and not only kept.

        Without a `weight`, on any worker, gradients are averaged; with one they are multiplied by it and added up.
        """
        filling, place = self._places[parameter]
        if place.arrived:
            raise RuntimeError(
                f"the gradient of {place.name} has come twice in one backward pass, as when "
                f"reentrant checkpointing uses a parameter in several places; use checkpoint(..., use_reentrant=False)"
            )
        self._averages = weight is None
        place.take(weight)
        if not last:
            parameter.grad = None
            return
        place.arrived = True
        if self._arrivals is not None:
            self._arrivals.append(parameter)
        filling.missing -= 1
        if self.overlap and not filling.missing:
            self._start(whole=True)

    def finish(self, weight: float | None) -> list[bool]:
        """Sum what is left. All sums are there on return; tells for each place whether this worker had a gradient."""
        self._averages = weight is None
        for place in self.places:
            if not place.arrived:
                place.take(weight)
        used = [place.holds for place in self.places]
        self._start(whole=False)
        self._wait()
        self.drop()
        return used

    def abort(self) -> None:
        """Forget a pass that has failed. What it has started is waited for: the others have started it too."""
        self._wait()
        for place in self.places:
            if place.arrived:
                place.parameter.grad = None  # the engine may have written into it after the script has cleared it
        self._forget_arrivals()
        if self._codec is not None:
            self._codec.abort()
        self.drop()

    def drop(self) -> None:
        """Forget what was added up."""
        for place in self.places:
            place.holds = False

    def settle_order(self) -> None:
        """After a pass: cut the buckets anew if gradients came in another order than they have. All call it."""
        arrivals = self._arrivals
        self._forget_arrivals()
        if arrivals is None:
            return
        self._arrivals = None
        places = self.places
        numbers = {place.parameter: number for number, place in enumerate(places)}
        came = set(arrivals)
        absent = [number for parameter, number in numbers.items() if parameter not in came]
        order = torch.tensor([*(numbers[parameter] for parameter in arrivals), *absent])
        self._group.broadcast(order)
        if order.tolist() != list(range(len(places))):
            self._make([(places[number].name, places[number].parameter) for number in order.tolist()])

    def _forget_arrivals(self) -> None:
        for place in self.places:
            place.arrived = False
        if self._arrivals is not None:
            self._arrivals = []

    def _make(self, named: list[tuple[str, nn.Parameter]]) -> None:
        self._fillings = lay_out(
            named,
            self._group,
            self._bucket_bytes,
            in_order=self._codec is not None,
            gather_all=self._accumulates,
            codec_weighs=self._codec is not None and self._codec.weighs,
        )
        self._places = {place.parameter: (filling, place) for filling in self._fillings for place in filling.places}
        self.places = [place for filling in self._fillings for place in filling.places]

    def _start(self, whole: bool) -> None:
        while len(self._started) < len(self._fillings):
            filling = self._fillings[len(self._started)]
            if whole and filling.missing:
                return
            self._started.append(self._reduce(filling))

    def _reduce(self, filling: Filling) -> Callable[[], object]:
        if self._thread is None or self._codec is None:
            return self._group.all_reduce(filling.flat, "avg" if self._averages else "sum", wait=False).wait
        if filling.compressible:
            steps = self._codec.steps(filling.bucket, self._group)
        else:
            steps = _sum(self._group, filling.flat)  # with a codec, gradients are weighted
        return self._thread.submit(self._turns.add, steps).result

    def _wait(self) -> None:
        """Return when the sums of all buckets that were started are there."""
        if self._thread is not None:
            self._started.append(self._thread.submit(self._turns.drain).result)
        for wait in self._started:
            wait()
        self._started.clear()
        for filling in self._fillings:
            filling.missing = len(filling.places)


def _sum(group: EngineGroup, flat: Tensor) -> Iterator[Pending]:
    yield group.all_reduce(flat, wait=False)
