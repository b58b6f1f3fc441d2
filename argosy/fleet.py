"""The facade: a `Fleet` is what the script speaks to when it has joined its job by `argosy.init()` (`joining.py`).

Thin: it wires the parts together and passes calls on. Where each part's work is done is listed in the README.
"""

from __future__ import annotations

import atexit
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from argosy.checkpoint.checkpoints import Checkpoints
from argosy.checkpoint.roles import roles
from argosy.comm.agree import check_agreement
from argosy.comm.config import CommConfig
from argosy.comm.group import Group, SoloGroup
from argosy.comm.mean import Value, mean_of
from argosy.comm.second import join_second
from argosy.control.job import Job
from argosy.data.batches import BatchConfig
from argosy.data.cursor import Cursor
from argosy.observe.channel import Channel
from argosy.observe.events import EventLog
from argosy.observe.folder import events_file
from argosy.observe.meter import Meter
from argosy.observe.progress import progress_on
from argosy.observe.warned import Warned
from argosy.parallel.mesh import Mesh
from argosy.parallel.mesh_config import MeshConfig, Sizes
from argosy.parallel.step_count import StepCount
from argosy.parallel.training import Training
from argosy.parallel.training_config import TrainingConfig
from argosy.ps.agreement import check_tables
from argosy.ps.config import PsConfig
from argosy.ps.loaders import Loaders
from argosy.ps.served import Served
from argosy.ps.staleness import Staleness
from argosy.ps.tables import Tables
from argosy.strategy import Strategy


class Fleet:
    """The workers of a job, as one of them sees it. Made by `argosy.init`."""

    def __init__(
        self, job: Job, strategy: Strategy, group: Group, run_folder: Path, leaving: ExitStack, served: Served | None
    ) -> None:
        self.strategy, self.run_folder, self._served, self._leaving = strategy, run_folder, served, leaving
        self._distributed: list[Any] = []
        self._group, self._cursor = group, Cursor()
        self._models: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._progress = progress_on(sys.stderr) if job.channel is None and group.rank == 0 else None
        shown = self._progress.show if self._progress else None
        listener = shown if job.channel is None else Channel.at(job.channel, leaving).event
        self._log = EventLog(events_file(run_folder, group.rank), group.rank, listener)
        self._meter, self._warned = Meter(self._log, time.monotonic), Warned(self._log)
        self._steps = StepCount(self._cursor, self._meter)
        self._mesh = Mesh.of(strategy.part(MeshConfig).sizes(group.size), group.hosts)
        # What servers step, workers train alone: nothing is reduced between them.
        apart = served is not None and strategy.dense == "server"
        self._tables = Tables(served, strategy.part(PsConfig), group, self._cursor)
        self._loaders = Loaders(
            strategy.part(BatchConfig), self._cursor, self._mesh, group, served, self._tell_shares, self._log.emit
        )
        self._training = Training(
            strategy.part(TrainingConfig),
            Mesh.of(Sizes(), [0]) if apart else self._mesh,
            strategy.part(MeshConfig).stage,
            SoloGroup() if apart else group,
            self._cursor,
            strategy.accumulate,
            self._log.emit,
            lambda line: self.print(f"argosy: {line}"),
        )
        self._checkpoints = Checkpoints(
            group,
            lambda: join_second(group, strategy.part(CommConfig), "saves"),
            strategy.to_line(),
            self._training,
        )
        self._meter.start(world=group.size, threads=torch.get_num_threads(), strategy=strategy.to_line())
        for line in self._mesh.picture():
            self.print(f"argosy: {line}")
        for name, fields in group.findings():
            self._log.emit(name, **fields)
        atexit.register(self.close)

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self._group.rank

    @property
    def world(self) -> int:
        """How many workers the job has."""
        return self._group.size

    @property
    def group(self) -> Group:
        """The workers as a group that exchanges tensors: the low-level primitives, see docs/primitives.md."""
        return self._group

    @property
    def is_first(self) -> bool:
        """Whether this is worker 0: the one that prints and writes files."""
        return self.rank == 0

    @property
    def steps(self) -> int:
        """How many steps the optimizer has made; after `fleet.load`, those before the checkpoint included."""
        return self._steps.total

    def staleness(self) -> Staleness | None:
        """How old gradients were when servers applied them, and how many came late, so far; None without servers.

        >>> import tempfile, argosy
        >>> argosy.init(run_folder=tempfile.mkdtemp()).staleness() is None
        True
        """
        return self._served.staleness() if self._served is not None else None

    def distribute(self, *parts: Any) -> Any:
        """Make models, optimizers and DataLoaders part of the job; they come back in the order they were given.

        Models and optimizers stay the objects they were: a model's parameters and buffers are set to those of rank 0,
        and from now on every `backward()` leaves the gradient of the whole job's batch. A DataLoader comes back as
        one that gives this worker its share.

        >>> import tempfile, torch, argosy
        >>> fleet = argosy.init(run_folder=tempfile.mkdtemp())
        >>> net = torch.nn.Linear(4, 1)
        >>> model, optimizer = fleet.distribute(net, torch.optim.SGD(net.parameters(), lr=0.1))
        >>> model is net
        True
        """
        if not parts:
            raise TypeError("distribute() takes the model, the optimizer and the DataLoaders of the script")
        self._models = [part for part in parts if isinstance(part, nn.Module)] or self._models
        self._optimizers = [part for part in parts if isinstance(part, Optimizer)] or self._optimizers
        placed = [self._place(part) for part in parts]
        # What acts on an optimizer's steps must know the models and the batches, in whatever order they were given.
        for part in (part for part in parts if isinstance(part, Optimizer)):
            self._training.add_optimizer(part)
            self._tables.add_optimizer(part)
            self._leaving.callback(self._steps.watch(part))
        return tuple(placed) if len(placed) > 1 else placed[0]

    def step(self, x: Any, y: Any, loss_fn: Callable[[Any, Any], Tensor], *, clip_norm: float | None = None) -> Tensor:
        """One whole training step; returns the mean loss over the whole job's batch.

        It trains the model and the optimizer that were distributed last. `x` goes into the model (a tuple or list as
        its arguments, a dict as its keywords); `loss_fn(output, y)` is a mean over the batch. With `clip_norm`, the
        gradient is scaled down to this norm if it is longer, over all workers that hold parts of it, without tables.

        >>> import tempfile, torch, argosy
        >>> fleet = argosy.init(run_folder=tempfile.mkdtemp())
        >>> net = torch.nn.Linear(4, 1)
        >>> _ = fleet.distribute(net, torch.optim.SGD(net.parameters(), lr=0.1))
        >>> fleet.step(torch.ones(2, 4), torch.ones(2, 1), torch.nn.functional.mse_loss).shape
        torch.Size([])
        """
        if len(self._models) != 1 or len(self._optimizers) != 1:
            remedy = "write the step out with backward() and optimizer.step()"
            if not self._optimizers:
                remedy = 'give it one; where a model is tables alone, torch.optim.SGD([{"params": []}]) steps them'
            raise RuntimeError(
                f"fleet.step trains one model with one optimizer; distribute() got {len(self._models)} models and "
                f"{len(self._optimizers)} optimizers; {remedy}"
            )
        (model,), (optimizer,) = self._models, self._optimizers
        if clip_norm is not None:
            self._tables.check_clipping()
        return self._training.step(model, optimizer, x, y, loss_fn, clip_norm)

    def forward(self, x: Any) -> Any:
        """The model's output for this worker's samples, without gradients: to evaluate it, in every mode.

        It is the model that was distributed last; `x` is as for `step`. All workers call it: under pipeline parallelism
        it is the one way to evaluate, and elsewhere the same as calling the model, which replicas agree on first.

        >>> import tempfile, torch, argosy
        >>> fleet = argosy.init(run_folder=tempfile.mkdtemp())
        >>> model = fleet.distribute(torch.nn.Linear(4, 1))
        >>> fleet.forward(torch.ones(2, 4)).shape
        torch.Size([2, 1])
        """
        if len(self._models) != 1:
            raise RuntimeError(f"fleet.forward runs one model, and distribute() got {len(self._models)}")
        return self._training.forward(self._models[0], x)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in this block add gradients up on each worker; the next one outside reduces them.

        >>> import tempfile, torch, argosy
        >>> fleet = argosy.init(run_folder=tempfile.mkdtemp())
        >>> model = fleet.distribute(torch.nn.Linear(4, 1))
        >>> with fleet.no_sync():
        ...     model(torch.ones(2, 4)).mean().backward()
        >>> model(torch.ones(2, 4)).mean().backward()
        """
        return self._training.no_sync()

    def averaged(self) -> AbstractContextManager[None]:
        """Models hold the moving average of their parameters in this block: to evaluate or save them. See `average=`.

        >>> import tempfile, torch, argosy
        >>> fleet = argosy.init("average=ema:0.99", run_folder=tempfile.mkdtemp())
        >>> net = torch.nn.Linear(4, 1)
        >>> model, optimizer = fleet.distribute(net, torch.optim.SGD(net.parameters(), lr=0.1))
        >>> with fleet.averaged():
        ...     evaluated = model(torch.ones(2, 4))
        """
        return self._training.averaged()

    def report(self, loss: Tensor | float) -> None:
        """Tell the loss of this worker's batch, so that progress and events show its mean over the whole job.

        It travels with the gradients, so it is said before `loss.backward()`. `fleet.step` does it by itself.

        >>> import tempfile, torch, argosy
        >>> fleet = argosy.init(run_folder=tempfile.mkdtemp())
        >>> model = fleet.distribute(torch.nn.Linear(4, 1))
        >>> loss = model(torch.ones(2, 4)).mean()
        >>> fleet.report(loss)
        >>> loss.backward()
        """
        self._cursor.loss = float(loss.detach() if isinstance(loss, Tensor) else loss)

    def mean(self, value: Value, weight: float | None = None) -> Value:
        """The mean of a number or tensor over all workers; all of them call this.

        Workers are weighted by samples: inside the loop over a distributed loader by those of the batch in hand, so
        that the mean of a loss is what one process would have computed; after the loop by all that the worker saw in
        it, so that the mean of its accuracy is right too. Before any loop they count the same. `weight` says otherwise:
        an evaluation inside the training loop gives the samples it has seen. A worker of weight zero is left out; so is
        one that was lost, if the job goes on without it.

        >>> import tempfile, argosy
        >>> argosy.init(run_folder=tempfile.mkdtemp()).mean(2.5)
        2.5
        """
        add_up = self._served.add_up if self._served is not None and self._served.meets else self._group.all_reduce
        with self._cursor.waiting(meets=False):
            return mean_of(value, self._cursor.weight if weight is None else weight, add_up)

    def print(self, *values: Any, **options: Any) -> None:
        """`print`, on the first worker only.

        >>> import tempfile, argosy
        >>> argosy.init(run_folder=tempfile.mkdtemp()).print("once")
        once
        """
        if self.is_first:
            print(*values, **options)

    def save(
        self,
        path: str | Path,
        *parts: Any,
        step: int | None = None,
        wait: bool = True,
        keep: int | None = None,
    ) -> None:
        """Write a checkpoint of models, optimizers, schedulers and loaders, into a folder `step-00000120` under `path`.

        All workers call it. It is whole or absent, and loads again on any mesh of workers. `step` is the number of the
        optimizer's steps so far, unless given. `wait=False` copies what is to be saved and writes it in the background:
        the next save, `fleet.saved()` or the end of the job waits for it. `keep=3` keeps the last three. See
        docs/checkpoints.md.

        >>> import tempfile, torch, argosy
        >>> fleet = argosy.init(run_folder=tempfile.mkdtemp())
        >>> net, other = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
        >>> fleet.save(f"{fleet.run_folder}/net", net)
        >>> fleet.load(f"{fleet.run_folder}/net", other)
        True
        >>> torch.equal(net.weight, other.weight)
        True
        """
        named, models = roles(parts), self._named_models(parts)
        self._tables.before_saving(parts)
        self._training.synchronise()
        number, alike = self.steps if step is None else step, self.strategy.sync == "step"
        held = self._checkpoints.save(path, named, models, step=number, wait=wait, keep=keep, alike=alike)
        self._log.emit("save", path=str(path), step=int(number), parts=held, wait=wait)

    def saved(self) -> None:
        """Return when the checkpoint that is being written in the background is whole; raise the error if it failed.

        >>> import tempfile, torch, argosy
        >>> fleet = argosy.init(run_folder=tempfile.mkdtemp())
        >>> fleet.save(f"{fleet.run_folder}/net", torch.nn.Linear(4, 1), wait=False)
        >>> fleet.saved()
        """
        self._checkpoints.finish()

    def load(self, path: str | Path, *parts: Any, missing_ok: bool = False) -> bool:
        """Read a checkpoint into models, optimizers, schedulers and loaders.

        `path` is a folder of checkpoints, of which the newest whole one is taken, or that of one step. With
        `missing_ok`, all workers return False if there is none yet; one that is damaged is an error as ever.

        >>> import tempfile, torch, argosy
        >>> fleet = argosy.init(run_folder=tempfile.mkdtemp())
        >>> net = torch.nn.Linear(4, 1)
        >>> fleet.load(f"{fleet.run_folder}/net", net, missing_ok=True)
        False
        """
        named = roles(parts)
        if missing_ok and not self._checkpoints.are_at(path):
            return False
        self._training.synchronise()
        step = self._checkpoints.load(path, named, self._named_models(parts))
        self._tables.after_loading(parts)
        if step is not None:
            self._steps.go_on_from(step)
        self._log.emit("load", path=str(path), step=step, parts=list(named))
        return True

    def export(self, path: str | Path, model: nn.Module) -> None:
        """Write a model's tensors, whole, into one plain safetensors file, on the first worker. All workers call it.

        >>> import tempfile, torch, argosy
        >>> from safetensors.torch import load_file
        >>> fleet = argosy.init(run_folder=tempfile.mkdtemp())
        >>> net = torch.nn.Linear(4, 1)
        >>> fleet.export(f"{fleet.run_folder}/net.safetensors", net)
        >>> torch.equal(load_file(f"{fleet.run_folder}/net.safetensors")["weight"], net.weight)
        True
        """
        self._training.synchronise()
        self._checkpoints.export(path, model)
        self._log.emit("export", path=str(path))

    def close(self) -> None:
        """Leave the job. It happens by itself when the script ends; calling it twice is harmless."""
        self._close(failed=getattr(sys, "last_value", None) is not None)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close(failed=kind is not None)

    def _close(self, failed: bool) -> None:
        atexit.unregister(self.close)
        with ExitStack() as leaving:  # whatever fails, the rest is done too
            leaving.callback(self._leaving.close)
            leaving.callback(self._training.close)
            leaving.callback(self._tables.close)
            leaving.callback(self._log.close)
            leaving.callback(self._end, failed)
            self._checkpoints.drop() if failed else self._checkpoints.close()

    def _end(self, failed: bool) -> None:
        if self._progress is not None:
            self._progress.close()
        self._warned.close()
        if self._served is not None and self.is_first and not failed:
            self._served.tell_staleness(self._log.emit)
        self._meter.end("failed" if failed else "done")

    def _named_models(self, parts: tuple[Any, ...]) -> list[nn.Module]:
        """The models that an optimizer's parameters have their names from, each once."""
        known = [part for part in (*self._distributed, *parts) if isinstance(part, nn.Module)]
        return list({id(model): model for model in known}.values())

    def _place(self, part: Any) -> Any:
        if any(part is placed for placed in self._distributed):
            raise ValueError(f"this {type(part).__name__} is distributed already; distribute each object once")
        self._distributed.append(part)
        if isinstance(part, nn.Module):
            check_tables(part, self._group if self._served is not None else SoloGroup())
            self._tables.add_model(part)
            self._training.add_model(part, len(self._distributed))
        elif isinstance(part, DataLoader):
            loader = self._loaders.make(part, len(self._distributed))
            self._training.add_loader(loader)
            check_agreement("the data", loader.outline(), self._group)
            self._log.emit("batches", arithmetic=loader.arithmetic)
            self.print(f"argosy: {loader.arithmetic}")
            return loader
        elif not isinstance(part, (Optimizer, LRScheduler)):  # a scheduler follows its optimizer, the same object
            said = (
                f"distribute() was given a {type(part).__name__}; it takes models (nn.Module), optimizers, DataLoaders"
            )
            raise TypeError(f"{said} and learning rate schedulers")
        return part

    def _tell_shares(self, shares: list[int]) -> None:
        self._log.emit("shares", samples=shares)
        self.print(f"argosy: samples of a step by worker: {' + '.join(map(str, shares))} (balance=true)")
