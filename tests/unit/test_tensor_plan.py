"""Tensor plans: what is recognised in a model, what a user says instead, what is refused, and how it is told."""

from __future__ import annotations

import models
import pytest
import torch
from torch import nn

from argosy.config import ConfigError
from argosy.parallel.tensor.config import TensorConfig
from argosy.parallel.tensor.plan import make_plan
from argosy.parallel.tensor.recognise import recognise


def plan(model: nn.Module, tensor_plan: str = "auto", size: int = 2) -> dict[str, str]:
    styles = make_plan(model, size, TensorConfig(tensor_plan=tensor_plan)).styles
    return {name: str(style) for name, style in styles.items()}


def divided(model: nn.Module, tensor_plan: str = "auto", size: int = 2) -> dict[str, str]:
    return {name: style for name, style in plan(model, tensor_plan, size).items() if style != "replicate"}


def module(**parts: nn.Module) -> nn.Module:
    """A parent of its own kind."""
    parent = nn.Module()
    for name, part in parts.items():
        parent.add_module(name, part)
    return parent


def test_a_gpt_is_recognised_and_told_in_a_line_for_each_kind() -> None:
    assert make_plan(models.Gpt(layers=3), 2, TensorConfig()).lines() == [
        "tensor plan for 2 ranks",
        "  wte              vocab    64 rows of 32",
        "  h.*.attn.c_attn  column3  32 -> 96       x 3",
        "  h.*.attn.c_proj  row      32 -> 32       x 3",
        "  h.*.mlp.c_fc     column   32 -> 128      x 3",
        "  h.*.mlp.c_proj   row      128 -> 32      x 3",
        "  lm_head          column   32 -> 64",
        "  whole on every rank: wpe, h.*.ln_1, h.*.ln_2, ln_f",
    ]


def test_separate_projections_and_gates_are_recognised() -> None:
    found = divided(models.Gpt(layers=1, tied=False, written_out=True))
    assert found == {
        "wte": "vocab",
        "h.0.attn.q_proj": "column",
        "h.0.attn.k_proj": "column",
        "h.0.attn.v_proj": "column",
        "h.0.attn.out_proj": "row",
        "h.0.mlp.gate_proj": "column",
        "h.0.mlp.up_proj": "column",
        "h.0.mlp.down_proj": "row",
        "lm_head": "column",
    }


def test_torchs_layers_are_recognised() -> None:
    assert divided(models.Encoder()) == {
        f"encoder.layers.{layer}.{name}": style
        for layer in range(2)
        for name, style in (("self_attn", "heads"), ("linear1", "column"), ("linear2", "row"))
    }
    decoder = nn.TransformerDecoderLayer(16, 4, 16)  # whose MLP is as wide inside as outside
    assert divided(decoder) == {"self_attn": "heads", "multihead_attn": "heads", "linear1": "column", "linear2": "row"}


def test_pairs_in_a_sequential_are_recognised() -> None:
    assert divided(models.mlp()) == {"0": "column", "2": "row", "4": "column", "7": "row"}
    mixing = nn.Sequential(nn.Linear(4, 8), nn.Softmax(-1), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 6))
    assert divided(mixing) == {"2": "column", "4": "row"}


def test_sizes_decide_where_names_do_not() -> None:
    assert divided(module(a=nn.Linear(4, 10), b=nn.Linear(10, 4))) == {"a": "column", "b": "row"}
    assert divided(module(a=nn.Linear(10, 4), b=nn.Linear(4, 10))) == {"a": "column", "b": "row"}  # a bottleneck
    assert divided(module(a=nn.Linear(4, 20), b=nn.Linear(10, 4))) == {"a": "column2", "b": "row"}
    grouped = module(wq=nn.Linear(16, 16), wk=nn.Linear(16, 8), wv=nn.Linear(16, 8), wo=nn.Linear(16, 16))
    assert divided(grouped) == {"wq": "column", "wk": "column", "wv": "column", "wo": "row"}
    with_dropout = module(to_qkv=nn.Linear(8, 24), to_out=nn.Sequential(nn.Linear(8, 8), nn.Dropout()))
    assert divided(with_dropout) == {"to_qkv": "column3", "to_out.0": "row"}
    block = module(attention=nn.Linear(8, 24), back=nn.Linear(8, 8), mlp=models.mlp())
    assert not {"attention", "back"} & divided(block).keys()
    block.heads = 4  # with heads, d -> 3k and k -> d are attention, whatever they are called
    assert divided(block).items() >= {"attention": "column3", "back": "row"}.items()
    for speaks_against in (
        {"another": nn.Linear(8, 8)},  # one of the two is
        {"another": nn.Linear(24, 8)},
        {"attends": nn.MultiheadAttention(8, 2)},
    ):
        other = module(attention=nn.Linear(8, 24), back=nn.Linear(8, 8), mlp=models.mlp(), **speaks_against)
        other.heads = 4
        assert "back" not in divided(other), speaks_against
    for heads in (1, 3):  # a guess that does not divide is left whole, not refused
        block.heads = heads
        assert not {"attention", "back"} & divided(block).keys()


def test_only_vocabularies_are_divided_by_rows() -> None:
    pair = module(a=nn.Linear(4, 8), b=nn.Linear(8, 4))
    small, large, positions = nn.Embedding(100, 4), nn.Embedding(5000, 4), nn.Embedding(5000, 4)
    lookup = nn.Embedding(5000, 4, max_norm=1.0)
    model = module(mlp=pair, kind=small, token=large, position_table=positions, clipped=lookup)
    assert divided(model) == {"mlp.a": "column", "mlp.b": "row", "token": "vocab"}


def test_a_users_plan_comes_before_what_is_inferred() -> None:
    model = models.Gpt(layers=1)
    assert divided(model, "h.*.mlp:replicate") == {
        "wte": "vocab",
        "h.0.attn.c_attn": "column3",
        "h.0.attn.c_proj": "row",
        "lm_head": "column",
    }
    assert divided(model, "*.c_fc:column, *.mlp.c_proj:row, *:replicate") == {
        "h.0.mlp.c_fc": "column",
        "h.0.mlp.c_proj": "row",
    }
    assert plan(model, "*:replicate").keys() == plan(model).keys()


def test_tied_weights_are_divided_alike() -> None:
    assert "lm_head" not in divided(models.Gpt(), "wte:replicate")
    assert "wte" not in divided(models.Gpt(), "lm_head:replicate")
    assert "lm_head" in divided(models.Gpt(tied=False), "wte:replicate")
    with pytest.raises(ConfigError, match=r"wte \(vocab\), lm_head \(row\) share a parameter"):
        plan(models.Gpt(), "wte:vocab,lm_head:row")


class Heads(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.proj = heads, nn.Linear(12, 36), nn.Linear(12, 12)


@pytest.mark.parametrize(
    ("model", "size", "error"),
    [
        (
            models.Gpt(vocabulary=65),
            2,
            r"tensor=2: wte has num_embeddings=65, .* pad it to 66, .* tensor_plan=wte:repl",
        ),
        (models.Gpt(heads=2), 4, r"tensor=4: h.0.attn.c_attn has 2 heads, .* tensor_plan=h.0.attn:replicate"),
        (Heads(3), 2, r"tensor=2: qkv has 3 heads, which do not divide among 2 ranks; .* tensor_plan=qkv:replicate"),
        (models.mlp(), 5, r"tensor=5: 0 has out_features=64, which does not divide among 5 ranks; pad it to 65"),
        (models.Encoder(heads=1), 2, r"tensor=2: encoder.layers.0.self_attn has 1 heads"),
        (nn.Linear(4, 4), 2, r"tensor_plan=auto: nothing in this Linear is recognised"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(model: nn.Module, size: int, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        plan(model, size=size)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("h.*.mlp", "'h.*.mlp' is no pattern:style, with a style of column"),
        ("a:colum", "'a:colum' is no pattern:style"),
        ("", "'' is no pattern:style"),
        ("h.*.attn:heads", "'h.*.attn' has no parameters of its own; say it of what is in it, as h.*.attn.c_attn"),
        ("nothing:row", "'nothing' fits no module; there are wte, wpe, h.*.ln_1, h.*.attn.c_attn"),
        ("ln_f:row", "ln_f is a LayerNorm, and row is for nn.Linear; narrow the pattern 'ln_f'"),
        ("wte:column", "wte is a Embedding, and column is for nn.Linear"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(models.Gpt(), text)
    assert error in str(caught.value)
    assert str(caught.value).startswith(f"tensor_plan={text}: ")


def test_models_without_numbers_are_planned_too() -> None:
    with torch.device("meta"):
        model = models.Gpt(layers=1)
    assert plan(model) == plan(models.Gpt(layers=1))


def test_layers_that_compute_in_their_own_way_stay_whole() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 3

    plain, scaled = (nn.Sequential(kind(8, 32), nn.ReLU(), kind(32, 8)) for kind in (nn.Linear, Scaled))
    normed = nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(*sizes)) for sizes in ((8, 32), (32, 8))))
    assert sorted(map(str, recognise(plain, 2).styles.values())) == ["column", "row"]
    assert not recognise(scaled, 2).styles
    assert not recognise(normed, 2).styles


def test_layers_of_one_list_are_told_apart_only_where_they_are_unlike() -> None:
    sizes = ((8, 16), (16, 8), (8, 16), (16, 4))
    chain = nn.Sequential(*(layer for each in sizes for layer in (nn.Linear(*each), nn.ReLU())))
    told = make_plan(chain, 2, TensorConfig()).lines()[1:]
    assert [line.split()[:2] for line in told] == [["0", "column"], ["2", "row"], ["4", "column"], ["6", "row"]]
    lists = nn.ModuleDict({"up": nn.ModuleList(nn.Linear(8, 16) for _ in range(6))})
    told = make_plan(lists, 2, TensorConfig(tensor_plan="up.*:column")).lines()[1:]
    assert [line.split() for line in told] == [["up.*", "column", "8", "->", "16", "x", "6"]]
