"""Load what may be missing, from a folder that only worker 0 sees: before a save and after it."""

import os
from pathlib import Path

from torch import nn

import argosy

fleet = argosy.init()
own = Path(f"host{fleet.rank}")
own.mkdir()
os.chdir(own)  # relative paths of the workers are different ones
model = nn.Linear(2, 2)
if not fleet.is_first:
    Path("net").mkdir()
    Path("net/step-00000001").mkdir()  # and what is there elsewhere is not asked for
before = fleet.load("net", model, missing_ok=True)
fleet.save("net", model)
print("found", before, fleet.load("net", model, missing_ok=True), flush=True)
