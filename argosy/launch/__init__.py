"""Starting a job: the launcher and its workers.

Read `launcher.py` (one run), `worker.py` (one process), `bootstrap.py` (what that process runs first), `nodes.py`
(several machines), `screen.py` (what is shown).
"""
