"""torch.distributed.rpc with the rows on the server, as its tutorial has it: a remote object is asked and told.

A worker's push is under way while it pulls the next batch, as in any asynchronous training. Rows are looked up as they
come, or made distinct by the worker first, which pays where ids repeat.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed.rpc as rpc
from ps_workload import BATCHES, DIM, KEPT, PATIENCE_SECONDS, RATE, ROWS, ids_of, in_circles, serves
from serving import Operation, Seat, serve
from torch import Tensor

SERVER = "server"

Wanted = dict[str, Any]


class Table:
    """Rows on the server, and what their optimizer keeps."""

    def __init__(self, rule: str) -> None:
        self._rows = torch.empty(ROWS, DIM).uniform_(-0.01, 0.01)
        self._squares = torch.full((ROWS, DIM), 0.1) if rule == "adagrad" else None

    def pull(self, ids: Tensor) -> Tensor:
        """The rows of any ids."""
        return self._rows[ids]

    def push(self, ids: Tensor, gradients: Tensor) -> None:
        """Update the rows of distinct ids; of any ids, if the rule only adds."""
        if self._squares is None:
            self._rows.index_add_(0, ids, gradients, alpha=-RATE)
            return
        squares = self._squares[ids].addcmul_(gradients, gradients)
        self._squares[ids] = squares
        self._rows.index_add_(0, ids, gradients.div_(squares.sqrt_()), alpha=-RATE)


def summed(gradients: Tensor, places: Tensor, count: int) -> Tensor:
    """The gradients of the same id added up."""
    return torch.zeros(count, DIM).index_add_(0, places, gradients)


@cache
def table(rule: str) -> Table:
    """On the server: the one table with a rule."""
    return Table(rule)


def pull(rule: str, ids: Tensor) -> Tensor:
    """On the server."""
    return table(rule).pull(ids)


def push(rule: str, ids: Tensor, gradients: Tensor) -> None:
    """On the server."""
    table(rule).push(ids, gradients)


def rows_of(seat: Seat, wanted: Wanted) -> Operation:
    """Pull the rows of each batch, and push a gradient for each."""
    rule = wanted["rule"]
    kept = torch.from_numpy(ids_of(wanted["ids"], seat.rank)).view(KEPT, -1)
    following = in_circles(KEPT)

    def batch() -> Any:
        ids = kept[following()]
        if wanted["distinct"]:
            unique, places = ids.unique(return_inverse=True)
            rows = rpc.rpc_sync(SERVER, pull, (rule, unique))[places]
            return rpc.rpc_async(SERVER, push, (rule, unique, summed(rows * 1e-3, places, len(unique))))
        gradients = rpc.rpc_sync(SERVER, pull, (rule, ids)) * 1e-3
        if rule == "adagrad":
            ids, places = ids.unique(return_inverse=True)
            gradients = summed(gradients, places, len(ids))
        return rpc.rpc_async(SERVER, push, (rule, ids, gradients))

    def run() -> None:
        under_way = batch()
        for _ in range(BATCHES - 1):
            pushed, under_way = under_way, batch()
            pushed.wait()
        under_way.wait()

    def check() -> None:
        mine = torch.tensor([seat.rank])
        before = rpc.rpc_sync(SERVER, pull, (rule, mine))
        rpc.rpc_sync(SERVER, push, (rule, mine, torch.ones(1, DIM)))
        if not bool((rpc.rpc_sync(SERVER, pull, (rule, mine)) < before).all()):
            raise AssertionError("a push has not changed its row")

    return Operation(run, lambda: None, check)


def main() -> None:
    seat = Seat.from_arguments()
    torch.set_num_threads(1)
    name = SERVER if seat.rank == 0 else f"worker-{seat.rank}"
    # Its shared memory is polled by a busy thread in each process, also while others have their turns; sockets are not.
    options = rpc.TensorPipeRpcBackendOptions(
        rpc_timeout=PATIENCE_SECONDS,
        init_method=f"tcp://{seat.store}",
        _transports=["uv"],
        _channels=["basic"],
    )
    rpc.init_rpc(name, rank=seat.rank, world_size=seat.size, rpc_backend_options=options)
    make = serves if seat.rank == 0 else lambda wanted: rows_of(seat, wanted)
    serve(seat, make, rpc.shutdown)


main()
