"""torch's distributed checkpoint (DCP) of a model that FSDP2 has sharded, on Gloo."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from serving import Operation, Seat, serve
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_tensors import PATIENCE, meet


def main() -> None:
    seat = Seat.from_arguments()
    store = meet(seat)
    dist.init_process_group("gloo", store=store, rank=seat.rank, world_size=seat.size, timeout=PATIENCE)
    mesh = init_device_mesh("cpu", (seat.size,))

    def make(wanted: dict[str, Any]) -> Operation:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(wanted["layers"])))
        for layer in net:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        folder = Path(wanted["folder"])

        def save() -> None:
            dcp.save(get_model_state_dict(net), checkpoint_id=folder)

        def load() -> None:
            state = get_model_state_dict(net)
            dcp.load(state, checkpoint_id=folder)
            set_model_state_dict(net, state)

        def prepare() -> None:
            if seat.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            dist.barrier()
            if wanted["what"] == "load":
                save()
            dist.barrier()

        return Operation(save if wanted["what"] == "save" else load, prepare)

    serve(seat, make, leave=dist.destroy_process_group)


main()
