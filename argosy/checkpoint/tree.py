"""State dicts as data: nested Python values split into JSON and named tensors, and joined again.

What `state_dict()` returns holds numbers, text, lists, tuples, dicts with any plain keys, and tensors. Tensors go to
safetensors under a name; the rest becomes JSON in which nothing can be executed. Any other value is refused.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor


def split(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """The JSON form of `value`; its tensors are put into `tensors` under names that begin with `where`.

    >>> import torch
    >>> found: dict[str, Tensor] = {}
    >>> split({"lr": 0.1, 0: torch.ones(2)}, found, "state")
    {'dict': [['lr', 0.1], [0, {'tensor': 'state.0'}]]}
    >>> list(found)
    ['state.0']
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        # Keys "a.b" and "a" -> "b" would have the same name, and safetensors keeps __metadata__ to itself.
        while where in tensors or where == "__metadata__":
            where += "'"
        tensors[where] = value
        return {"tensor": where}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"  # a scheduler keeps its milestones in one
        return {kind: [[_key(key, where), split(item, tensors, _within(where, key))] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [split(item, tensors, _within(where, number)) for number, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    raise TypeError(f"{where} is a {type(value).__name__}: a checkpoint holds numbers, text, lists, dicts and tensors")


def join(form: Any, tensors: dict[str, Tensor]) -> Any:
    """The value that `split` took apart."""
    if not isinstance(form, dict):
        return form
    ((kind, content),) = form.items()
    if kind == "tensor":
        return tensors[content]
    if kind in ("dict", "counter"):
        values = {key: join(item, tensors) for key, item in content}
        return values if kind == "dict" else Counter(values)
    if kind not in ("list", "tuple"):
        raise ValueError(f"{kind!r} is not a kind of value")
    items = [join(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items


def storable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as a file takes them: on the CPU, contiguous, none sharing memory with another (tied weights)."""
    seen: set[int] = set()
    stored = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        if (
            plain.untyped_storage().data_ptr() in seen
            or plain.numel() * plain.element_size() != plain.untyped_storage().nbytes()
        ):
            plain = plain.clone()
        seen.add(plain.untyped_storage().data_ptr())
        stored[name] = plain
    return stored


def _within(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def _key(key: Any, where: str) -> str | int:
    if isinstance(key, (str, int)) and not isinstance(key, bool):
        return key
    raise TypeError(f"{where} has the key {key!r}: the keys of a checkpoint are text or whole numbers")
