"""One rank of a group on hosts of its own choosing: measures, chooses, and runs every algorithm. Tells it as JSON."""

import dataclasses
import json
import sys
from pathlib import Path

import torch
from torch.distributed import FileStore

from argosy.comm.config import CommConfig
from argosy.comm.engine import EngineGroup
from argosy.comm.schedule import Collective

SIZES = (64, 4 << 10, 1 << 20)


def main() -> None:
    rank, size, store, host = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]

    def joined(name: str, algorithm: str) -> EngineGroup:
        config = dataclasses.replace(CommConfig(timeout_seconds=30, sockets=2), algorithm=algorithm)
        place = FileStore(str(store), size)
        return EngineGroup.join(place, rank, size, config=config, secret=None, host_id=host, name=name)

    group = joined("auto", "auto")
    topology = group.measure_links()
    choices = [group.selector.choose(kind, size_bytes) for kind in Collective for size_bytes in SIZES]
    sums = {}
    for name in [*group.selector.names(Collective.ALL_REDUCE)]:
        other = joined(name, name)
        for size_bytes in SIZES:
            tensor = other.empty(size_bytes // 4) + rank
            other.all_reduce(tensor)
            sums[f"{name} {size_bytes}"] = sorted({*tensor.tolist()})
        whole = torch.full((4,), float(rank))
        other.broadcast(whole, 1)  # which has no ring: another one is found
        sums[f"{name} broadcast"] = sorted({*whole.tolist()})
        other.barrier()
        other.close()
    group.barrier()
    group.close()
    told = {"topology": dataclasses.asdict(topology), "choices": [*map(dataclasses.asdict, choices)], "sums": sums}
    print(json.dumps(told))


main()
