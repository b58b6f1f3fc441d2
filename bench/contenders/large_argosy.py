"""What models in parts take: memory, idle time, checkpoints. The strategy comes with the environment."""

from __future__ import annotations

import gc
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp  # before memory is measured: what it loads is not the model's
from models import VOCABULARY, deep_gpt
from seating import join
from serving import Operation, Seat, serve
from torch import nn
from torch.nn import functional

import argosy

Wanted = dict[str, Any]
LENGTH = 8  # tokens of the one sample: activations are to be next to nothing


class Peak:
    """The most memory that this process has had since, watched from a thread."""

    def __init__(self) -> None:
        self.bytes, self._on = 0, True
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> int:
        self._on = False
        self._thread.join()
        return self.bytes

    def _watch(self) -> None:
        while self._on:
            self.bytes = max(self.bytes, own_bytes())
            time.sleep(0.002)


def own_bytes() -> int:
    """Memory of this process alone."""
    return _told("status", "RssAnon")


def shared_bytes() -> int:
    """This process's share of the memory that its host's ranks have in common: buckets of gradients, and windows."""
    return _told("smaps_rollup", "Pss_Shmem")


def _told(file: str, name: str) -> int:
    lines = Path(f"/proc/self/{file}").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def memory(wanted: Wanted, fleet: argosy.Fleet) -> Operation:
    """Some steps of AdamW; tells the peak above what there was before."""
    fleet.group.all_reduce(torch.zeros(1 << 20))  # windows are there whatever is trained
    _train_a_little()
    before, shared = own_bytes(), shared_bytes()
    net = deep_gpt(width=576)  # 192 million parameters: some 30 MB of torch's own bookkeeping are little beside them
    size = sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())
    fleet.distribute(net, torch.optim.AdamW(net.parameters(), lr=1e-4))
    gc.collect()
    peak, x = Peak(), torch.randint(VOCABULARY, (1, LENGTH))

    def tell() -> dict[str, float]:
        return {"peak": peak.end() - before + shared_bytes() - shared, "parameters": size}

    return Operation(lambda: fleet.step(x, x, loss_of), fleet.group.barrier, tell=tell)


def _train_a_little() -> None:
    """A step of a small model: what torch loads and sets up for any training is not the large model's."""
    net = deep_gpt(layers=1, width=384)
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.randint(VOCABULARY, (1, LENGTH))
    loss_of(net(x), x).backward()
    optimizer.step()


def on_meta(wanted: Wanted, fleet: argosy.Fleet) -> Operation:
    """A model of a billion parameters that is written down on the meta device; tells the peak of setting it up."""
    before, peak = own_bytes(), Peak()
    with torch.device("meta"):
        net = deep_gpt(layers=wanted["layers"], width=wanted["width"])
    size = sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())
    fleet.distribute(net)
    most = peak.end() - before
    return Operation(lambda: None, fleet.group.barrier, tell=lambda: {"peak": most, "parameters": size})


def bubble(wanted: Wanted, fleet: argosy.Fleet) -> Operation:
    """Steps of a pipeline; tells the idle part of its workers' time."""
    torch.manual_seed(0)
    net = deep_gpt(layers=8, width=384)
    model, _ = fleet.distribute(net, torch.optim.SGD(net.parameters(), lr=1e-4))
    x = torch.randint(VOCABULARY, (wanted["batch"], 128))

    def tell() -> dict[str, float]:
        measured, theory = fleet._training._staged[model].pipeline.bubble
        return {"idle": measured or 0.0, "theory": theory}

    return Operation(lambda: fleet.step(x, x, loss_of), fleet.group.barrier, tell=tell)


def checkpoint(wanted: Wanted, fleet: argosy.Fleet) -> Operation:
    """Save, load, or save in the background, a sharded model."""
    torch.manual_seed(0)
    net = layers(wanted["layers"])
    fleet.distribute(net)
    folder = Path(wanted["folder"])
    ways: dict[str, Callable[[], object]] = {
        "save": lambda: fleet.save(folder, net, keep=1),
        "load": lambda: fleet.load(folder, net),
        "stall": lambda: fleet.save(folder, net, keep=1, wait=False),
    }

    def prepare() -> None:
        fleet.saved()
        if wanted["what"] != "load" and fleet.is_first:  # what was saved before is removed outside of the time
            shutil.rmtree(folder, ignore_errors=True)
        if wanted["what"] == "load":
            fleet.save(folder, net, keep=1)
        fleet.group.barrier()

    return Operation(ways[wanted["what"]], prepare)


def layers(count: int) -> nn.Module:
    """Each has 16 MiB of parameters."""
    return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(count)))


def main() -> None:
    seat = Seat.from_arguments()
    fleet = join(seat)
    ways = {"memory": memory, "meta": on_meta, "bubble": bubble, "checkpoint": checkpoint}
    serve(seat, lambda wanted: ways[wanted["way"]](wanted, fleet), fleet.close)


main()
