"""Communication between the workers of a job.

Read `group.py` (the interface), then `gloo.py` (the plain implementation). How a collective is described, proved,
priced and drawn: `schedule.py`, `algorithms/`, `verify.py`, `topology.py` and `cost.py`, `draw.py`. How ranks find each
other: `rendezvous.py`, with `board.py` and `sockets.py`; how an algorithm is chosen: `trials.py`,
`measure.py`, `select.py`.
"""
