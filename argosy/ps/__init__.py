"""The parameter server: embeddings with an open vocabulary, and training by workers that do not wait for each other.

Read `embedding.py` (what a user has), `store.py` and `remote.py` (where rows live, and who waits for whom),
`tables.py` (what happens when the optimizer steps); then `rules.py` (the optimizers that rows are updated with),
`initializers.py` and `entry.py` (what a row begins as, and which ids get one); `dense.py` and `geo.py`. Processes:
`config.py` (what a user may choose), `serve.py` (a server's process) and `door.py` (who is let in), `joining.py` (how
a worker finds the servers), `served.py` (what it has of them). Tables, and all that travels, are native:
`csrc/table*` and `csrc/ps_*`. See docs/design/0008.
"""

from argosy.ps.entry import Entry
from argosy.ps.initializers import Initial
from argosy.ps.rules import FTRL, SGD, Adagrad, Adam, AdamW, Momentum, RMSProp, RowRule, table_config
from argosy.ps.schedule import factor

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Entry",
    "Initial",
    "Momentum",
    "RMSProp",
    "RowRule",
    "factor",
    "table_config",
]
