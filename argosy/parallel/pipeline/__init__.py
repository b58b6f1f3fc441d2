"""Pipeline parallelism: each worker holds some layers of a model, and micro-batches flow through them.

Read `config.py` (what may be chosen), then how a model is cut: `layers.py` (where it can be), `ghost.py` (the model
without its numbers), `trace.py` (what depends on what), `cost.py` and `partition.py` (where it is best), `parts.py`
(which worker holds what), `gate.py` (how a stage runs its part of a forward that it did not write). Then how it is run:
`micro_batches.py`, `torch_stage.py` and `pipeline.py` on torch's schedules, `turns.py` and `uneven.py` for stages with
different numbers of workers.
"""
