"""Ways to train in parallel.

Read `mesh.py` (who does what), then `data.py` (data parallelism), `local.py` (replicas that meet every k steps),
`layout.py` (how models are laid out that no worker holds whole), `divided.py` and `staged.py` (how these train), and
the packages `sharding`, `tensor` and `pipeline`. `combinations.py` says what goes together.
"""
