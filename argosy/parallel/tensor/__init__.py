"""Tensor parallelism: each layer's matrices are divided among the ranks of the mesh's tensor axis.

Read `plan.py` (a style for each module, inferred by `recognise.py`), `apply.py` (a plan made true), `layers.py` and
`attention.py` (what a module then computes), `rules.py` (what tensors do on the way between them).

[Note: what a tensor is] Inside a tensor parallel model a plain tensor is the same on all ranks of the axis, and
whatever is not the same is a DTensor, which says how. So a model's own code, between the modules that are divided,
computes what it says, with global numbers: a plan changes what a step costs, and never what it computes.
"""
