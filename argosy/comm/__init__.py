"""Communication between the workers of a job.

Read `group.py` (the interface), then `gloo.py` (the plain implementation).
"""
