"""Communication between the workers of a job.

Read `group.py` (the interface), then `engine.py` (the group that runs in native code, `csrc/`). How a collective is
described, proved, priced and drawn: `schedule.py`, `algorithms/`, `verify.py`, `topology.py` and `cost.py`, `draw.py`;
what of it a rank runs: `plans.py`. How ranks find each other: `rendezvous.py`, with `board.py` and `sockets.py`. How an
algorithm is chosen: `trials.py`, `measure.py`, `select.py`. The torch.distributed backend: `backend.py`, then
`torch_group.py`, `staging.py` and `work.py`.
"""
