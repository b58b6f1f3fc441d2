"""Mixed precision: 16 bits inside the model, fp32 around it, and a loss scale that follows the gradients."""

import collections
import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from argosy.optim.attention import attend_in_full
from argosy.optim.autocast import autocast_forward, full
from argosy.optim.config import OptimConfig
from argosy.optim.loss_scale import LossScaler
from argosy.optim.precision import Precision

Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclass
class Output:
    logits: Tensor
    names: list[str]


class Probe(nn.Module):
    """Tells in what type it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.inside: torch.dtype | None = None

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        hidden = self.layer(x) * scale
        self.inside = hidden.dtype
        return hidden


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_computes_in_16_bits_and_the_script_sees_32(dtype: torch.dtype) -> None:
    model = Probe()
    handle = autocast_forward(model, dtype)
    for output in (model(torch.ones(2, 4), scale=2.0), model.forward(torch.ones(2, 4))):
        assert model.inside == dtype
        assert output.dtype == torch.float32
    model(torch.ones(2, 4)).sum().backward()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.layer.weight.grad is not None
    assert model.layer.weight.grad.dtype == torch.float32
    assert list(model.state_dict()) == ["layer.weight", "layer.bias"]
    handle.close()
    model(torch.ones(2, 4))
    assert model.inside == torch.float32
    assert "forward" not in vars(model)


def test_outputs_are_full_however_deep() -> None:
    short = torch.ones(1, dtype=torch.bfloat16)
    value = {
        "list": [short, 3],
        "pair": Pair(short, "text"),
        "record": Output(short, ["a"]),
        "ordered": collections.OrderedDict(x=(short,)),
        "double": short.double(),
    }
    wide = full(value)
    assert wide["list"][0].dtype == wide["pair"].left.dtype == torch.float32
    assert isinstance(wide["pair"], Pair)
    assert wide["record"].logits.dtype == wide["ordered"]["x"][0].dtype == torch.float32
    assert isinstance(wide["ordered"], collections.OrderedDict)
    assert wide["double"].dtype == torch.float64
    assert value["list"][0].dtype == torch.bfloat16, "what the model keeps is not changed"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_models_can_be_copied_and_pickled(precision: Any) -> None:
    model = Probe()
    Precision(OptimConfig(precision=precision)).attach(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            twin.layer.weight.zero_()
            assert torch.equal(twin(torch.ones(1, 4))[0], twin.layer.bias.to(twin.inside).float())
        assert twin.inside == model.forward.dtype
    assert model.layer.weight.abs().sum() > 0


@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_models_work(in_place: bool) -> None:
    torch.manual_seed(0)
    model = Probe()
    torch._dynamo.reset()
    if in_place:
        model.compile(backend="eager")
    compiled: Any = model if in_place else torch.compile(model, backend="eager")
    plain = compiled(torch.ones(2, 4)).detach()
    handle = autocast_forward(compiled, torch.bfloat16)
    output = compiled(torch.ones(2, 4))
    assert model.inside == torch.bfloat16
    assert output.dtype == torch.float32
    torch.testing.assert_close(output.detach(), plain, rtol=0.02, atol=0.02)
    handle.close()
    compiled(torch.ones(2, 4))
    assert model.inside == torch.float32


def digits(precision: Any, steps: int = 40) -> tuple[float, float]:
    """A small net trained as fleet.step would; its loss before and after."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    x, y = torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
    how = Precision(OptimConfig(precision=precision))
    how.attach(net)
    losses = []
    for _ in range(steps):
        with how.whole_step():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            how.backward(loss)
            assert how.step(optimizer)
        losses.append(float(loss.detach()))
    return losses[0], losses[-1]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_small_net_trains_as_in_fp32(precision: str) -> None:
    first, last = digits(precision)
    first32, last32 = digits("fp32")
    assert first == pytest.approx(first32, rel=0.02)
    assert last < first / 5
    assert last == pytest.approx(last32, abs=0.05)


def scaled_weight(gradient: float) -> tuple[nn.Parameter, torch.optim.SGD]:
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.full((3,), gradient)
    return weight, torch.optim.SGD([weight], lr=1.0)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_gradient_that_is_not_finite_skips_the_step_and_halves_the_scale(bad: float) -> None:
    how = Precision(OptimConfig(precision="fp16"))
    weight, sgd = scaled_weight(2.0**16)
    assert weight.grad is not None
    weight.grad[1] = bad
    assert how.step(sgd) is False
    assert torch.equal(weight, torch.zeros(3))
    assert how.state_dict() == {"factor": 2.0**15, "clean": 0}
    weight.grad = torch.full((3,), 2.0**15)
    assert how.step(sgd) is True
    assert torch.equal(weight.detach(), torch.full((3,), -1.0))


def test_2000_clean_steps_double_the_scale() -> None:
    scaler = LossScaler()
    for _ in range(1999):
        scaler.update(finite=True)
    assert scaler.factor == 2.0**16
    scaler.update(finite=True)
    assert scaler.factor == 2.0**17
    for _ in range(1999):
        scaler.update(finite=True)
    scaler.update(finite=False)
    assert scaler.factor == 2.0**16
    for _ in range(2000):
        scaler.update(finite=True)
    assert scaler.factor == 2.0**17


def test_a_loss_that_is_never_finite_is_reported() -> None:
    scaler = LossScaler()
    for _ in range(32):
        scaler.update(finite=False)
    with pytest.raises(FloatingPointError, match=r"not finite at any scale.*precision=bf16"):
        scaler.update(finite=False)


def test_gradients_of_all_kinds_are_divided() -> None:
    scaler = LossScaler(start=4.0)
    sparse = torch.tensor([4.0, 0.0, 8.0, 0.0, 0.0]).to_sparse()
    dense = [torch.full((2,), 4.0), torch.full((3,), 8.0, dtype=torch.float64), torch.ones(0)]
    assert scaler.unscale_([*dense, sparse])
    assert dense[0].tolist() == [1.0, 1.0]
    assert dense[1].tolist() == [2.0] * 3
    assert sparse.to_dense().tolist() == [1.0, 0.0, 2.0, 0.0, 0.0]
    assert scaler.unscale_([])


def test_gradients_may_be_clipped_between_dividing_and_stepping() -> None:
    how = Precision(OptimConfig(precision="fp16"))
    weight, sgd = scaled_weight(2.0**16)
    assert how.unscale_(sgd)
    nn.utils.clip_grad_norm_([weight], 1.0)
    assert how.step(sgd), "divided once only"
    assert float(weight.detach().norm()) == pytest.approx(1.0, rel=1e-4)


def test_steps_that_only_gather_gradients_are_not_clean_steps() -> None:
    how = Precision(OptimConfig(precision="fp16"))
    weight, sgd = scaled_weight(1.0)
    weight.grad = None
    assert how.step(sgd)
    assert how.state_dict()["clean"] == 0


def test_a_restored_scale_goes_on() -> None:
    earlier, later = (Precision(OptimConfig(precision="fp16")) for _ in range(2))
    assert earlier.scaler is not None
    earlier.scaler.update(finite=False)
    earlier.scaler.update(finite=True)
    later.load_state_dict(earlier.state_dict())
    assert later.state_dict() == {"factor": 2.0**15, "clean": 1}
    later.load_state_dict(Precision(OptimConfig()).state_dict())
    assert later.state_dict() == {"factor": 2.0**15, "clean": 1}


def test_training_in_fp16_outside_of_a_whole_step_is_refused() -> None:
    model = Probe()
    how = Precision(OptimConfig(precision="fp16"))
    how.attach(model)
    with pytest.raises(RuntimeError, match=r"fleet\.step"):
        model(torch.ones(2, 4))
    with how.whole_step():
        model(torch.ones(2, 4))
    with torch.no_grad():
        model(torch.ones(2, 4))
    model.eval()
    model(torch.ones(2, 4))


def test_a_step_with_gradients_of_an_unscaled_loss_is_refused() -> None:
    model = Probe().eval()
    how = Precision(OptimConfig(precision="fp16"))
    how.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    guard = how.guard(optimizer)
    assert guard is not None
    before = model.layer.weight.detach().clone()
    optimizer.step()  # without a gradient there is nothing to refuse
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"fleet\.step.*model\.eval\(\)"):
        optimizer.step()
    assert torch.equal(model.layer.weight, before)
    with how.whole_step():
        optimizer.zero_grad()
        how.backward(model(torch.ones(2, 4)).mean() / 10)
        assert how.step(optimizer)
    assert not torch.equal(model.layer.weight, before)
    guard.remove()
    optimizer.step()


def test_fp32_leaves_everything_alone() -> None:
    model = Probe()
    how = Precision(OptimConfig())
    assert how.attach(model) is None
    assert how.guard(torch.optim.SGD(model.parameters())) is None
    how.backward(model(torch.ones(2, 4)).mean())
    assert how.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.inside == torch.float32
    assert how.state_dict() == {}


class Attending(nn.Module):
    """Attention as models write it, that tells in what type it was computed and what came out."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 48)
        self.out: torch.dtype | None = None

    def forward(self, x: Tensor, mask: Tensor | None = None, reentrant: bool | None = None) -> Tensor:
        if reentrant is None:
            return self.attend(x, mask)
        again: Tensor = checkpoint(self.attend, x, mask, use_reentrant=reentrant)
        return again

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = self.mix(x).view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
        self.out = seen.dtype
        return seen.transpose(1, 2).reshape(2, 8, 16)


@pytest.mark.parametrize("kind", ["causal", "added", "chosen"])
def test_attention_to_few_positions_is_computed_in_fp32_and_told_in_bf16(kind: str) -> None:
    torch.manual_seed(0)
    masks = {"causal": None, "added": torch.randn(8, 8), "chosen": torch.ones(8, 8, dtype=torch.bool).tril()}
    mask = masks[kind]
    grads: list[Tensor | None] = []
    model, x = Attending(), torch.randn(2, 8, 16)
    mixed = functional.linear(x.bfloat16(), model.mix.weight.bfloat16(), model.mix.bias.bfloat16()).float()
    query, key, value = mixed.view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4)
    exact = functional.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None)
    handle = autocast_forward(model, torch.bfloat16)
    assert torch.equal(model(x, mask), exact.bfloat16().float().transpose(1, 2).reshape(2, 8, 16))
    assert model.out is torch.bfloat16
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x, mask), model(x, mask))
    for reentrant in (None, False, True):
        model.zero_grad()
        model(x.requires_grad_(), mask, reentrant).sum().backward()
        grads.append(model.mix.weight.grad)
    assert all(grad is not None and torch.equal(grad, grads[0]) for grad in grads)
    handle.close()


def test_attention_that_autocast_leaves_alone_stays_so() -> None:
    attend_in_full()
    q = torch.randn(2, 2, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert functional.scaled_dot_product_attention(q, q, q).dtype is torch.bfloat16
        assert functional.scaled_dot_product_attention(q.double(), q.double(), q.double()).dtype is torch.float64
        with torch.autocast("cpu", enabled=False):
            assert functional.scaled_dot_product_attention(q, q, q).dtype is torch.float32
    assert functional.scaled_dot_product_attention(q.bfloat16(), q.bfloat16(), q.bfloat16()).dtype is torch.bfloat16
