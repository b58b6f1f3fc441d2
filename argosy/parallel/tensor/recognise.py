"""Finding in a model what can be divided: attention, MLPs, vocabularies.

By structure first: which modules a parent holds, and whether their sizes follow on each other. Names decide only
where sizes do not: which of several square matrices is the query's. What is not recognised stays whole on every rank,
which is slower and never wrong: see [Note: what a tensor is].
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules import activation

from argosy.parallel.tensor.styles import Style, computes_as

_FUSED = ("qkv", "c_attn", "in_proj", "qkv_proj", "wqkv", "query_key_value", "to_qkv", "attn_qkv")
_QUERY = ("q", "q_proj", "query", "wq", "w_q", "to_q", "q_lin", "q_linear", "query_proj")
_KEY = ("k", "k_proj", "key", "wk", "w_k", "to_k", "k_lin", "k_linear", "key_proj")
_VALUE = ("v", "v_proj", "value", "wv", "w_v", "to_v", "v_lin", "v_linear", "value_proj")
_OUT = ("out_proj", "c_proj", "proj", "o_proj", "wo", "w_o", "out", "to_out", "dense", "output", "o", "out_lin")
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "nhead", "heads", "n_local_heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
_PAIRS = (("linear1", "linear2"), ("fc1", "fc2"), ("c_fc", "c_proj"), ("lin1", "lin2"), ("up_proj", "down_proj"))
_POSITIONS = ("wpe", "pos")
_LARGE_ROWS = 4096  # an embedding without a head of its size is worth dividing from here on
_MIXING = (activation.MultiheadAttention, nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d, nn.GLU)

_Named = tuple[str, nn.Linear]  # its path, and the layer

COLUMN, ROW, VOCAB, HEADS, REPLICATE = map(Style, ("column", "row", "vocab", "heads", "replicate"))


@dataclass
class Found:
    """What was recognised: a style for each module by name, and numbers of heads by the modules that they divide."""

    styles: dict[str, Style] = field(default_factory=dict)
    heads: dict[str, int] = field(default_factory=dict)


def recognise(model: nn.Module, size: int) -> Found:
    """Everything in a model that can be divided, among so many ranks where that is a guess."""
    found = Found()
    for name, module in model.named_modules():
        if computes_as(module, nn.MultiheadAttention):
            if module._qkv_same_embed_dim and module.bias_k is None and not module.add_zero_attn:
                found.styles[name] = HEADS
        elif not any(part in found.styles for part in _ancestors(name)):
            _attention(name, module, found, size)
            _sequence(name, module, found)
            _block(name, module, found)
    _vocabularies(model, found)
    return found


def _ancestors(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _linears(name: str, module: nn.Module, found: Found) -> dict[str, _Named]:
    """The linear layers right inside a module, by what it calls them; a projection may have its dropout with it."""
    linears = {}
    for child, part in module.named_children():
        path = f"{name}.{child}" if name else child
        if isinstance(part, nn.Sequential) and len(part) and computes_as(part[0], nn.Linear):
            if sum(computes_as(each, nn.Linear) for each in part) > 1:
                continue
            path, part = f"{path}.0", part[0]
        if computes_as(part, nn.Linear) and path not in found.styles:
            linears[child.lower()] = (path, part)
    return linears


def _attention(name: str, module: nn.Module, found: Found, size: int) -> None:
    linears = _linears(name, module, found)
    out = next((linears[each] for each in _OUT if each in linears), None)
    fused = next((linears[each] for each in _FUSED if each in linears), None)
    if out is None or fused is None:
        fused, out = _fused_by_sizes(module, list(linears.values()), size) or (fused, out)
    if out is None:
        return
    if fused is not None and fused[1].out_features == 3 * out[1].in_features:
        found.styles[fused[0]] = Style("column", 3)
        found.styles[out[0]] = ROW
        _count(fused[0], module, _HEADS, found)
        return
    query, key, value = (
        next((linears[each] for each in names if each in linears), None) for names in (_QUERY, _KEY, _VALUE)
    )
    if query is None or key is None or value is None or query[1].out_features != out[1].in_features:
        return
    for path, _ in (query, key, value):
        found.styles[path] = COLUMN
    found.styles[out[0]] = ROW
    _count(query[0], module, _HEADS, found)
    grouped = key[1].out_features != query[1].out_features
    _count(key[0], module, _KEY_HEADS if grouped else _HEADS, found)


def _fused_by_sizes(module: nn.Module, linears: Sequence[_Named], size: int) -> tuple[_Named, _Named] | None:
    """Of a module with heads, whatever it calls them: the projections d -> 3k and k -> d, if there is one of each.

    As this is a guess, nothing may speak against it: attention beside them, heads that do not divide among so many
    ranks or do not go with the sizes, or another layer that takes the 3k.
    """
    heads = _heads(module, _HEADS)
    if heads is None or heads % size or any(isinstance(each, nn.MultiheadAttention) for each in module.children()):
        return None
    pairs = [
        (fused, out)
        for fused, out in itertools.permutations(linears, 2)
        if _shape(fused[1]) == (out[1].out_features, 3 * out[1].in_features) and out[1].in_features % heads == 0
    ]
    if len(pairs) != 1 or any(each.in_features == pairs[0][0][1].out_features for _, each in linears):
        return None
    return pairs[0]


def _count(path: str, module: nn.Module, names: tuple[str, ...], found: Found) -> None:
    """A number of heads, if the module tells it; if not, the model's own view of them will show whether it divides."""
    if number := _heads(module, names):
        found.heads[path] = number


def _heads(module: nn.Module, names: Sequence[str]) -> int | None:
    told = (getattr(module, each, None) for each in names)
    return next((n for n in told if isinstance(n, int) and not isinstance(n, bool) and n > 0), None)


def _sequence(name: str, module: nn.Module, found: Found) -> None:
    """Pairs of linear layers in a Sequential, with nothing between that mixes features."""
    if not isinstance(module, nn.Sequential):
        return
    first: _Named | None = None
    for child, part in module.named_children():
        path = f"{name}.{child}" if name else child
        if computes_as(part, nn.Linear) and path not in found.styles:
            if first is not None and first[1].out_features == part.in_features:
                found.styles[first[0]], found.styles[path] = COLUMN, ROW
                first = None
            else:
                first = (path, part)
        elif not _elementwise(part):
            first = None


def _elementwise(module: nn.Module) -> bool:
    known = type(module).__module__ == activation.__name__ or isinstance(module, nn.Dropout | nn.Identity)
    return known and not isinstance(module, _MIXING)


def _block(name: str, module: nn.Module, found: Found) -> None:
    """An MLP as a module of its own, or inside a block: d -> k -> d, gated (two of d -> k) or fused gated (d -> 2k)."""
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return
    linears = {child: each for child, each in _linears(name, module, found).items() if each[0] not in found.styles}
    for first, second in _PAIRS:
        if first in linears and second in linears:
            (_, up), (_, down) = linears[first], linears[second]
            if up.in_features == up.out_features == down.in_features == down.out_features:
                found.styles[linears[first][0]], found.styles[linears[second][0]] = COLUMN, ROW
                return
    for path, down in linears.values():
        inner, outer = down.in_features, down.out_features
        if inner == outer:
            continue
        same = [each for each in linears.values() if _shape(each[1]) == _shape(down)]
        ups = [each for each in linears.values() if _shape(each[1]) == (outer, inner)]
        fused = [each for each in linears.values() if _shape(each[1]) == (outer, 2 * inner)]
        # d -> k and k -> d look alike the other way round: what is declared first comes first.
        order = [each[0] for each in linears.values()]
        if len(same) != 1 or any(order.index(up[0]) > order.index(path) and len(ups) == 1 for up in ups):
            continue
        if 1 <= len(ups) <= 2 and not fused:
            found.styles.update({each[0]: COLUMN for each in ups})
        elif len(fused) == 1 and not ups:
            found.styles[fused[0][0]] = Style("column", 2)
        else:
            continue
        found.styles[path] = ROW
        return


def _shape(linear: nn.Linear) -> tuple[int, int]:
    return linear.in_features, linear.out_features


def _vocabularies(model: nn.Module, found: Found) -> None:
    """Embeddings by rows, and the heads that give a logit for each row."""
    modules = list(model.named_modules())
    for name, table in modules:
        if (
            not computes_as(table, nn.Embedding)
            or table.max_norm is not None
            or table.sparse
            or table.scale_grad_by_freq
        ):
            continue
        rows = table.num_embeddings
        heads = [
            path
            for path, each in modules
            if computes_as(each, nn.Linear) and _shape(each) == (table.embedding_dim, rows) and path not in found.styles
        ]
        named = name.rpartition(".")[2].lower().startswith(_POSITIONS)
        if named or not (heads or rows >= _LARGE_ROWS):
            continue
        found.styles[name] = VOCAB
        found.styles.update(dict.fromkeys(heads, COLUMN))
