"""State dicts as data: nested Python values split into JSON and named tensors, merged over ranks, and joined again.

What `state_dict()` returns holds numbers, text, lists, tuples, dicts with any plain keys, and tensors. Tensors go to
safetensors under a name; the rest becomes JSON in which nothing can be executed. Any other value is refused.

A tensor's name is its path, `optimizer/state/0.weight/exp_avg`, so that ranks which hold different keys name the same
tensor alike. Whole numbers are written `#3`; `/`, `~` and a leading `#` in a key are escaped as `~1`, `~0` and `~2`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor


def split(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """The JSON form of `value`; its tensors are put into `tensors` under names that begin with `where`.

    >>> import torch
    >>> found: dict[str, Tensor] = {}
    >>> split({"lr": 0.1, 0: torch.ones(2)}, found, "state")
    {'dict': [['lr', 0.1], [0, {'tensor': 'state/#0'}]]}
    >>> list(found)
    ['state/#0']
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        tensors[where] = value
        return {"tensor": where}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"  # a scheduler keeps its milestones in one
        return {kind: [[_key(key, where), split(item, tensors, within(where, key))] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [split(item, tensors, within(where, number)) for number, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    raise TypeError(f"{where} is a {type(value).__name__}: a checkpoint holds numbers, text, lists, dicts and tensors")


def join(form: Any, tensor: Callable[[str], Any]) -> Any:
    """The value that `split` took apart; `tensor` gives the tensor of a name."""
    if not isinstance(form, dict):
        return form
    ((kind, content),) = form.items()
    if kind == "tensor":
        return tensor(content)
    if kind in ("dict", "counter"):
        values = {key: join(item, tensor) for key, item in content}
        return values if kind == "dict" else Counter(values)
    if kind not in ("list", "tuple"):
        raise ValueError(f"{kind!r} is not a kind of value")
    items = [join(item, tensor) for item in content]
    return tuple(items) if kind == "tuple" else items


def merge(first: Any, other: Any) -> Any:
    """The form of what two ranks hold together: keys of either; where both have a value, the first one's.

    >>> merge({"dict": [["a", 1]]}, {"dict": [["a", 2], ["b", 3]]})
    {'dict': [['a', 1], ['b', 3]]}
    """
    if first == other or not (isinstance(first, dict) and isinstance(other, dict)):
        return first
    (kind, mine), (other_kind, theirs) = *first.items(), *other.items()
    if kind != other_kind or kind in ("tensor", "counter"):
        return first
    if kind == "dict":
        mine_by_key, theirs_by_key = _by_key(mine), _by_key(theirs)
        merged = [[key, merge(item, theirs_by_key.get((type(key), key), item))] for key, item in mine]
        return {kind: merged + [pair for pair in theirs if (type(pair[0]), pair[0]) not in mine_by_key]}
    if len(mine) != len(theirs):
        return first
    return {kind: [merge(a, b) for a, b in zip(mine, theirs, strict=True)]}


def entries(form: Any) -> dict[str | int, Any]:
    """The keys of a dict's form, with the forms of their values."""
    if not isinstance(form, dict) or "dict" not in form:
        raise ValueError("it is no dict")
    return dict(form["dict"])


def within(where: str, key: object) -> str:
    """The path of a key inside a path."""
    if isinstance(key, int):
        return f"{where}/#{key}"
    text = str(key).replace("~", "~0").replace("/", "~1")
    return f"{where}/{'~2' + text[1:] if text.startswith('#') else text}"


def _by_key(pairs: list[Any]) -> dict[tuple[type, Any], Any]:
    return {(type(key), key): item for key, item in pairs}


def _key(key: Any, where: str) -> str | int:
    if isinstance(key, (str, int)) and not isinstance(key, bool):
        return key
    raise TypeError(f"{where} has the key {key!r}: the keys of a checkpoint are text or whole numbers")
