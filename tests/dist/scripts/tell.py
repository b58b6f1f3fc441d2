"""Write down what this worker sees of its job: `tell.py OUT`."""

import json
import os
import sys
import warnings
from pathlib import Path

import torch

import argosy

fleet = argosy.init()
print(f"out {fleet.rank}")
print(f"err {fleet.rank}", file=sys.stderr)
fleet.print("only the first")
warnings.warn("mind the gap", stacklevel=1)
secret = os.environ["ARGOSY_SECRET"]
commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (os.getpid(), os.getppid())]
seen = {
    "rank": fleet.rank,
    "world": fleet.world,
    "is_first": fleet.is_first,
    "mean": fleet.mean(float(fleet.rank)),
    "weighted": fleet.mean(torch.tensor([1.0, float(fleet.rank)]), weight=fleet.rank).tolist(),
    "threads": torch.get_num_threads(),
    "arguments": sys.argv[1:],
    "path": sys.path[0],
    "name": __name__,
    "secret in a command line": any(secret.encode() in command for command in commands),
    "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
}
Path(sys.argv[1], f"rank{fleet.rank}.json").write_text(json.dumps(seen))
