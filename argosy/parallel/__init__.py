"""Ways to train in parallel.

Read `mesh.py` (which axes there are), then `data.py` (data parallelism) and `local.py` (replicas that meet
every k steps).
"""
