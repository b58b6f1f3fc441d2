"""A job whose last worker needs three times as long for a sample, with equal shares or with balanced ones."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from serving import Operation, Seat, serve
from torch_tensors import PATIENCE, meet

from argosy.comm.config import CommConfig
from argosy.comm.engine import EngineGroup
from argosy.control.secret import Secret

sys.path.insert(0, str(Path(__file__).parents[1]))
import straggler


def main() -> None:
    seat = Seat.from_arguments()
    config, secret = CommConfig(timeout_seconds=PATIENCE.total_seconds()), Secret.from_hex(os.environ["ARGOSY_SECRET"])
    group = EngineGroup.join(meet(seat), seat.rank, seat.size, config=config, secret=secret)

    def make(wanted: dict[str, Any]) -> Operation:
        return Operation(lambda: straggler.train(group, wanted["balance"], steps=60), group.barrier)

    serve(seat, make, group.close)


main()
