"""torch's view of the coordinator: a `torch.distributed.Store`, so process groups rendezvous through it.

    store = CoordinatorStore(client, prefix="torch/")
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)

torch's C++ calls these methods through pybind11, which finds some of them under their C++ names; those have an alias.
The timeout lives in the C++ base class, where `PrefixStore` and torch itself set it, and is read from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from argosy.control.client import Client, CoordinatorError


class CoordinatorStore(Store):
    """A `Store` whose keys live in the coordinator, each under `prefix`.

    A key that does not come in time raises `torch.distributed.DistStoreError`, as torch's own stores do.

    [Note: lifetime] A process group made with a store keeps the C++ half of it and not the Python half, where the
    methods are; were the latter collected, the next rendezvous would fail inside torch. So the client keeps its
    stores alive: whoever made the client holds it until the groups are gone.
    """

    timeout: timedelta

    def __init__(self, client: Client, prefix: str = "", timeout: timedelta | None = None) -> None:
        super().__init__()
        self._client = client
        self._prefix = prefix
        client.keep(self)
        self.set_timeout(timedelta(seconds=client.timeout_seconds) if timeout is None else timeout)

    @property
    def address(self) -> str:
        """Where the coordinator listens, as host:port."""
        return self._client.address

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        with _torch_errors():
            self._client.set(self._prefix + key, _encoded(value))

    def get(self, key: str) -> bytes:
        """Return a key's value; wait up to `timeout` for it."""
        with _torch_errors():
            return self._client.get(self._prefix + key, self.timeout.total_seconds())

    def add(self, key: str, value: int) -> int:
        """Add to an integer and return the sum."""
        with _torch_errors():
            return self._client.add(self._prefix + key, value)

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all keys are there."""
        with _torch_errors():
            return self._client.check(self._prefixed(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait up to `timeout`, the store's own if not given, for all keys."""
        with _torch_errors():
            self._client.wait(self._prefixed(keys), (self.timeout if timeout is None else timeout).total_seconds())

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set the desired value if the key has the expected one; return what it then has."""
        with _torch_errors():
            return self._client.compare_set(self._prefix + key, _encoded(expected_value), _encoded(desired_value))

    def delete_key(self, key: str) -> bool:
        """Remove a key; tell whether it was there."""
        with _torch_errors():
            return self._client.delete(self._prefix + key)

    def num_keys(self) -> int:
        """Return how many keys the coordinator holds, those of other prefixes too, like torch's `PrefixStore`."""
        with _torch_errors():
            return self._client.num_keys()

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a key's value."""
        with _torch_errors():
            self._client.append(self._prefix + key, _encoded(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values in one round trip; wait up to `timeout` for them."""
        with _torch_errors():
            return self._client.multi_get(self._prefixed(keys), self.timeout.total_seconds())

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys in one round trip."""
        with _torch_errors():
            self._client.multi_set(self._prefixed(keys), [_encoded(value) for value in values])

    def has_extended_api(self) -> bool:
        """Tell torch that `append`, `multi_get` and `multi_set` work."""
        return True

    def clone(self) -> CoordinatorStore:
        """Return a store over the same keys with a timeout of its own."""
        return CoordinatorStore(self._client, self._prefix, self.timeout)

    # The names under which C++ looks for two of the methods.
    deleteKey: Callable[[CoordinatorStore, str], bool] = delete_key  # noqa: N815
    getNumKeys: Callable[[CoordinatorStore], int] = num_keys  # noqa: N815

    def _prefixed(self, keys: Sequence[str]) -> list[str]:
        return [self._prefix + key for key in keys]


@contextmanager
def _torch_errors() -> Iterator[None]:
    """Raise what torch's own stores raise: torch, and code written for it, catches `DistStoreError`."""
    try:
        yield
    except (OSError, CoordinatorError) as error:
        raise DistStoreError(str(error)) from error


def _encoded(value: str | bytes) -> bytes:
    return value.encode("utf-8") if isinstance(value, str) else bytes(value)
