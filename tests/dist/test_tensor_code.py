"""What a model's own code may do under tensor parallelism, and where its random numbers agree and differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from divided import check, joined
from ranks import Place, run
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from argosy.config import ConfigError
from argosy.parallel.tensor.apply import tensor_parallel
from argosy.parallel.tensor.config import TensorConfig

DEADLINE_SECONDS = 100

pytestmark = pytest.mark.timeout(110)


class Wrapped(nn.Module):
    """Attention whose way from q, k and v to heads is given."""

    def __init__(
        self, heads: Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]], bias: bool = True, width: int = 16
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.qkv(self.norm(x)), 4)
        mask = torch.tril(torch.ones(x.size(1), x.size(1), dtype=torch.bool))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.scale * self.proj(seen.transpose(1, 2).flatten(2))


def chunked(qkv: Tensor, heads: int) -> Any:
    return tuple(each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in qkv.chunk(3, dim=-1))


def viewed(qkv: Tensor, heads: int) -> Any:
    batch, time, _ = qkv.shape
    return qkv.reshape(batch, time, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)


def interleaved(
    qkv: Tensor, heads: int
) -> Any:  # as GPT-NeoX: the heads outermost, so that a fused plan is the wrong one
    batch, time, _ = qkv.shape
    return qkv.view(batch, time, heads, -1).transpose(1, 2).chunk(3, dim=-1)


class Odd(nn.Module):
    """Code that knows nothing of being divided, and does what divided tensors are not made for."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.norm = nn.BatchNorm1d(24)
        self.gate_up, self.out = nn.Linear(16, 64), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.up(x).transpose(1, 2)).transpose(1, 2)
        hidden = hidden / hidden.pow(2).mean(-1, keepdim=True).add(1e-3).sqrt()  # across what is divided
        ranked = hidden.sort(dim=-1).values.cumsum(-1) * 0.1
        total = torch.zeros_like(x).add_(self.down(hidden + ranked))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return total + self.out(F.silu(gate) * up) + torch.cat([hidden, hidden], -1)[..., 8:24]


class Regression(nn.Module):
    """A loss of the model's own, over what may be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        given = self.down(hidden)
        return given + F.mse_loss(given, torch.ones(16).expand_as(given)) + F.l1_loss(hidden, torch.ones_like(hidden))


class Recomputed(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.block = models.Block(models.FusedAttention(16, 4, dropout), models.Mlp(16, dropout), 16)
        self.again = True

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if self.again else self.block(x)


def _own_code(place: Place) -> None:
    mesh = joined(place)
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    for heads in (chunked, viewed, interleaved):
        check(lambda heads=heads: Wrapped(heads), mesh, x)
    check(lambda: Wrapped(interleaved), mesh, x, plan="qkv:column")
    check(lambda: Wrapped(chunked, bias=False), mesh, x, plan="qkv:column3,proj:replicate")
    check(lambda: Wrapped(viewed), mesh, x, sequence_parallel=True)
    check(Odd, mesh, x, plan="up:column,down:row,gate_up:column2,out:row")
    check(Odd, mesh, x, plan="up:column,down:row", sequence_parallel=True)
    check(Regression, mesh, x, plan="up:column,down:row")
    check(Regression, mesh, x, plan="up:column,down:row", sequence_parallel=True)
    check(lambda: Recomputed(0.0), mesh, x)
    check(lambda: Recomputed(0.0), mesh, x, sequence_parallel=True)
    with pytest.warns(UserWarning, match="a sequence of 5 does not divide by tensor=2"):
        check(lambda: Wrapped(viewed), mesh, x[:, :5], sequence_parallel=True)
    check(lambda: Wrapped(lambda qkv, _: chunked(qkv, 1)), mesh, x)  # a single head, which all ranks compute
    check(lambda: Wrapped(lambda qkv, heads: chunked(qkv.clamp_(-1, 1).cumsum(-1) * 0.1, heads)), mesh, x)
    in_place = Wrapped(lambda qkv, heads: chunked(qkv.cumsum_(-1), heads))
    divided = tensor_parallel(in_place, mesh, TensorConfig())
    with pytest.raises(RuntimeError, match="cumsum_ changes the output of a fused layer in place"):
        in_place(x)
    divided.close()
    three = Wrapped(lambda qkv, _: chunked(qkv, 3), width=12)
    divided = tensor_parallel(three, mesh, TensorConfig())
    with pytest.raises(ConfigError, match=r"qkv is divided among 2 ranks, and unflatten.* tensor_plan=qkv:replicate"):
        three(x[..., :12])
    divided.close()
    dist.destroy_process_group()


def test_a_models_own_code_computes_what_it_says() -> None:
    run(_own_code, 2, deadline_seconds=DEADLINE_SECONDS)


class Attention(nn.Module):
    """`nn.MultiheadAttention`, called in one of its many ways."""

    def __init__(self, call: Callable[[nn.Module, Tensor, Tensor], Any], **options: Any) -> None:
        super().__init__()
        self.attn, self.call = nn.MultiheadAttention(16, 4, **options), call

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        output, weights = self.call(self.attn, x, memory)
        return output if weights is None else torch.cat([output.flatten(), weights.flatten()])


def _multihead(place: Place) -> None:
    mesh = joined(place)
    generator = torch.Generator().manual_seed(0)
    x, memory = torch.randn(5, 3, 16, generator=generator), torch.randn(7, 3, 16, generator=generator)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    hidden = torch.rand(3, 5, generator=generator) > 0.7
    hidden[:, 0] = False
    by_head = torch.rand(12, 5, 5, generator=generator)
    ways: list[Callable[..., Any]] = [
        lambda attn, x, _: attn(x, x, x),
        lambda attn, x, _: attn(x, x, x, need_weights=False),
        lambda attn, x, _: attn(x, x, x, attn_mask=causal, is_causal=True, need_weights=False),
        lambda attn, x, _: attn(x, x, x, attn_mask=causal, key_padding_mask=hidden, average_attn_weights=False),
        lambda attn, x, _: attn(x, x, x, attn_mask=by_head, key_padding_mask=hidden, need_weights=False),
        lambda attn, x, memory: attn(x, memory, memory),
        lambda attn, x, memory: attn(x[:, 0], memory[:, 0], memory[:, 0] * 2),
    ]
    for way in ways:
        check(lambda way=way: Attention(way), mesh, x, memory)
    check(lambda: Attention(ways[5], bias=False, batch_first=True), mesh, x.transpose(0, 1), memory.transpose(0, 1))
    check(lambda: Attention(ways[0]), mesh, x, memory, plan="attn:replicate")
    with pytest.raises(ConfigError, match="attn has 3 heads, which do not divide among 2 ranks"):
        tensor_parallel(nn.ModuleDict({"attn": nn.MultiheadAttention(15, 3)}), mesh, TensorConfig())
    dist.destroy_process_group()


def test_multihead_attention_computes_the_same_in_all_its_ways() -> None:
    run(_multihead, 2, deadline_seconds=DEADLINE_SECONDS)


class Logits(nn.Module):
    """Divided logits of the shape that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.wte(ids))


class WithLoss(nn.Module):
    """A model that computes its own loss, as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = Logits()

    def forward(self, ids: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.logits(ids)
        return {
            "logits": logits,
            "loss": F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=-1),
        }


def losses(generator: torch.Generator) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    weight, chances = torch.rand(12, generator=generator), torch.rand(3, 5, 12, generator=generator)

    def by_hand(logits: Tensor, y: Tensor) -> Tensor:
        return -F.log_softmax(logits, dim=-1).gather(-1, y[..., None]).mean() + logits.pow(2).mean() * 0.1

    return {
        "flat": lambda logits, y: F.cross_entropy(logits.view(-1, 12), y.view(-1)),
        "module": lambda logits, y: nn.CrossEntropyLoss()(logits.flatten(0, 1), y.flatten()),
        "ignored": lambda logits, y: F.cross_entropy(logits.view(-1, 12), y.view(-1), ignore_index=3),
        "smoothed": lambda logits, y: F.cross_entropy(logits.view(-1, 12), y.view(-1), label_smoothing=0.1),
        "summed": lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y, reduction="sum"),
        "each": lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y, reduction="none").pow(2).mean(),
        "shifted": lambda logits, y: F.cross_entropy(logits[:, :-1].reshape(-1, 12), y[:, 1:].reshape(-1)),
        "weighted": lambda logits, y: F.cross_entropy(logits.view(-1, 12), y.view(-1), weight=weight),
        "chances": lambda logits, _: F.cross_entropy(logits.view(-1, 12), chances.view(-1, 12)),
        "by hand": by_hand,
        "ranking": lambda logits, y: F.multi_margin_loss(logits.reshape(-1, 12), y.reshape(-1)),
    }


def _losses(place: Place) -> None:
    mesh = joined(place)
    generator = torch.Generator().manual_seed(0)
    ids, y = (torch.randint(0, 12, (3, 5), generator=generator) for _ in range(2))
    torch.manual_seed(3)
    alone, model = Logits(), Logits()
    model.load_state_dict(alone.state_dict())
    divided = tensor_parallel(model, mesh, TensorConfig())
    for name, loss_fn in losses(generator).items():
        alone.zero_grad(), model.zero_grad()
        wanted = loss_fn(alone(ids), y)
        with divided.whole_step():
            logits = model(ids)
            loss = divided.whole(loss_fn(logits, y))
        assert isinstance(logits, DTensor), name
        assert logits.to_local().shape == (3, 5, 6), name
        assert type(loss) is Tensor, name
        torch.testing.assert_close(loss, wanted, msg=lambda m, n=name: f"{n}: {m}")
        wanted.backward(), loss.backward()
        for one, other in zip(alone.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(other.grad.full_tensor(), one.grad, msg=lambda m, n=name: f"{n}: {m}")
    with divided.whole_step(), pytest.raises(IndexError, match="outside the 12 classes"):
        F.cross_entropy(model(ids).view(-1, 12), y.view(-1) + 12)
    with pytest.raises(IndexError, match="wte: an index is outside its 12 rows"):
        model(ids + 12)
    told = WithLoss()
    told.logits.load_state_dict(alone.state_dict())
    tensor_parallel(told, mesh, TensorConfig())
    output = told(ids, y)
    assert {type(each) for each in output.values()} == {Tensor}
    torch.testing.assert_close(output["logits"], alone(ids))
    torch.testing.assert_close(output["loss"], F.cross_entropy(alone(ids).view(-1, 12), y.view(-1)))
    output["loss"].backward()
    with torch.autocast("cpu", torch.bfloat16), divided.whole_step():
        loss = F.cross_entropy(model(ids).view(-1, 12), y.view(-1))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(alone(ids).view(-1, 12), y.view(-1)), rtol=0.02, atol=0.02)
    loss.backward()
    dist.destroy_process_group()


def test_losses_of_divided_logits_are_those_of_whole_ones() -> None:
    run(_losses, 2, deadline_seconds=DEADLINE_SECONDS)


class Dropouts(nn.Module):
    """Dropout on a whole activation, and on a divided one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.inside, self.down, self.outside = (
            nn.Linear(4, 512),
            nn.Dropout(0.3),
            nn.Linear(512, 4),
            nn.Dropout(0.3),
        )

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.inside(self.up(x) * 0 + 1)
        return self.outside(self.down(self.hidden) * 0 + 1)


def _dropouts(place: Place) -> dict[str, Any]:
    mesh = joined(place)
    torch.manual_seed(place.rank)  # ranks that begin apart
    model = Dropouts()
    x = torch.ones(64, 4)
    tensor_parallel(model, mesh, TensorConfig())
    told = {"whole": model(x).detach(), "divided": model.hidden.to_local().detach()}
    torch.manual_seed(7)
    again = [(model(x).detach(), model.hidden.to_local().detach()) for _ in range(2)]
    torch.manual_seed(7)
    same = (model(x).detach(), model.hidden.to_local().detach())
    assert all(torch.equal(one, other) for one, other in zip(again[0], same, strict=True))  # seeds rule
    assert not any(torch.equal(one, other) for one, other in zip(*again, strict=True))  # and draws go on
    for options in ({"dropout": 0.4, "batch_first": True}, {}):
        attention: nn.Module = (
            nn.ModuleDict({"a": nn.MultiheadAttention(16, 4, **options)})
            if options
            else models.FusedAttention(16, 4, 0.4)
        )
        tensor_parallel(attention, mesh, TensorConfig())
        y = torch.ones(2, 8, 16)
        output = attention["a"](y, y, y, need_weights=False)[0] if options else attention(y)
        told["multihead" if options else "fused"] = output.detach()
    again_model = Recomputed(0.3)
    divided = tensor_parallel(again_model, mesh, TensorConfig())
    gradients = []
    for again_model.again in (True, False):
        torch.manual_seed(5)
        again_model.zero_grad()
        again_model(torch.ones(2, 6, 16)).pow(2).sum().backward()
        gradients.append([each.grad.to_local().clone() for each in again_model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    divided.close()
    told["state"] = torch.get_rng_state()
    dist.destroy_process_group()
    return {name: each.numpy() for name, each in told.items()}


def test_random_numbers_agree_where_tensors_do_and_differ_where_they_are_divided() -> None:
    first, second = (
        {name: torch.from_numpy(each) for name, each in told.items()}
        for told in run(_dropouts, 2, deadline_seconds=DEADLINE_SECONDS)
    )
    for name in ("whole", "multihead", "fused", "state"):
        assert torch.equal(first[name], second[name]), name
    assert not torch.equal(first["divided"], second["divided"])
    for each in (first["divided"], second["divided"]):
        kept = (each != 0).float().mean()
        assert abs(kept - 0.7) < 0.02
        assert torch.allclose(each[each != 0], torch.tensor(1 / 0.7))
    agree = ((first["divided"] != 0) == (second["divided"] != 0)).float().mean()
    assert abs(agree - (0.7**2 + 0.3**2)) < 0.02  # as of independent draws
    assert abs((first["whole"] != 0).float().mean() - 0.7) < 0.1
