"""Communication between the workers of a job.

Read `group.py` (the interface), then `gloo.py` (the plain implementation). How a collective is described, proved,
priced and drawn: `schedule.py`, `algorithms/`, `verify.py`, `topology.py` and `cost.py`, `draw.py`.
"""
