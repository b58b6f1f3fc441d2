"""Starting a job: the launcher and its workers.

Read `launch.py` (what is asked for), `launcher.py` (one run), `worker.py` (one process), `bootstrap.py` (what that
process runs first), `losses.py` (who may be lost), `nodes.py` (several machines), `screen.py` (what is shown).
"""
