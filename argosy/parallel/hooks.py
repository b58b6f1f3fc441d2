"""Our hooks on a script's model: a pickle of the model goes without them, and a copy of it shares them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """A function that a model calls.

    >>> import pickle
    >>> hook = Hook(lambda *_: "called")
    >>> hook(), pickle.loads(pickle.dumps(hook))()
    ('called', None)
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:  # noqa: D102
        return self._call(*args)

    def __deepcopy__(self, _: Any) -> Hook:
        return self

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _left_out, ()


def _left_out() -> Callable[..., None]:
    return _nothing


def _nothing(*_: Any) -> None:
    pass
