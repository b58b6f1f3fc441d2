"""Control: how the processes of a job prove that they belong to it, find each other and wait for each other.

A reader's path:

1. `secret`       what the processes of a job share
2. `handshake`    how two of them prove it to each other, byte for byte
3. `wire`         the messages that follow
4. `coordinator`  the service that the launcher starts: who gets in, who is dropped
5. `session`      one connection and its requests, over `table` (keys), `barriers` and `leases`, within `limits`
6. `client`       the blocking side of it; `lease_client`, that of leases; `meetings`, where those who are there meet
7. `store`        the client as torch's `Store`

`CoordinatorStore` is imported from `argosy.control.store` and not from here, because it brings torch with it, which a
launcher has no use for and would wait seconds for.
"""

from argosy.control.client import (
    Client,
    CoordinatorError,
    CoordinatorLost,
    CoordinatorUnreachable,
    DeadlineExceeded,
    Will,
)
from argosy.control.coordinator import Coordinator
from argosy.control.handshake import HandshakeError
from argosy.control.limits import Limits
from argosy.control.secret import Secret
from argosy.control.wire import MAX_MESSAGE_BYTES, WireError

__all__ = [
    "MAX_MESSAGE_BYTES",
    "Client",
    "Coordinator",
    "CoordinatorError",
    "CoordinatorLost",
    "CoordinatorUnreachable",
    "DeadlineExceeded",
    "HandshakeError",
    "Limits",
    "Secret",
    "Will",
    "WireError",
]
