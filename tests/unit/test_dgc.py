"""DGC and top-k in one process: stages, refusals, what is taken over from SGD, and when sparse pays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import argosy
from argosy.comm.pending import DONE
from argosy.comm.select import Selector
from argosy.comm.topology import Link, Topology
from argosy.compress.catalogue import make_codec
from argosy.compress.codec import Bucket, Part, extent
from argosy.compress.config import CompressConfig
from argosy.compress.dgc import DgcCodec, sparsity_at
from argosy.compress.takeover import return_momenta
from argosy.compress.topk import TopKCodec


class Mirrors:
    """A group whose members all bring what this one brings."""

    rank = 0

    def __init__(self, size: int, gbits: float | None = 1.0) -> None:
        """Each on a host of its own, or, without a network, all on one."""
        self.size, self.done = size, list[str]()
        hosts = tuple(range(size)) if gbits else (0,) * size
        self.selector = Selector(Topology(hosts, between=Link.ethernet(gbits or 1.0)))

    def empty(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(count, dtype=dtype)

    def all_reduce(self, tensor: Tensor, wait: bool = True) -> Any:
        self.done.append("all_reduce")
        tensor.mul_(self.size)
        return DONE

    def all_gather_into(self, out: Tensor, tensor: Tensor, wait: bool = True) -> Any:
        self.done.append("all_gather")
        out.copy_(tensor.repeat(self.size))
        return DONE


def bucket_of(**tensors: Tensor) -> Bucket:
    parts, begin = [], 0
    for name, tensor in tensors.items():
        parts.append(Part(name, tuple(tensor.shape), begin, begin + tensor.numel()))
        begin += tensor.numel()
    return Bucket(torch.cat([tensor.reshape(-1) for tensor in tensors.values()]), tuple(parts))


def attached(codec: DgcCodec, parameters: dict[str, nn.Parameter], **options: Any) -> torch.optim.SGD:
    optimizer = torch.optim.SGD(parameters.values(), **{"lr": 0.1, **options})
    codec.attach(parameters, optimizer)
    return optimizer


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))


def test_warm_up_has_four_stages_before_the_final_sparsity() -> None:
    stages = [0.75, 0.9375, 0.984375, 0.996, 0.999, 0.999]
    assert [sparsity_at(epoch, 0.999, 4) for epoch in range(6)] == stages
    assert [sparsity_at(2 * epoch + 1.99, 0.999, 8) for epoch in range(6)] == stages
    assert [sparsity_at(epoch, 0.999, 2) for epoch in (0, 0.5, 1, 1.5, 2)] == stages[:5]
    assert [sparsity_at(epoch, 0.95, 4) for epoch in range(5)] == [0.75, 0.9375, 0.95, 0.95, 0.95]
    assert sparsity_at(0, 0.999, 0) == 0.999


def test_sparsity_follows_the_epochs() -> None:
    sizes = []
    codec = DgcCodec(exchange="sparse")
    optimizer = attached(codec, {"w": weight(256, 256)})
    for epoch in range(5):
        codec.begin_step(epoch)
        before = codec.bytes_sent
        codec.reduce(bucket_of(w=torch.randn(256, 256)), Mirrors(2))  # type: ignore[arg-type]
        optimizer.step()
        sizes.append((codec.bytes_sent - before) // 6)
    assert sizes == [16385, 4097, 1025, 263, 67]  # 65536 times 1 - sparsity, and one for a distance beyond 65535


def test_codecs_come_from_a_strategy() -> None:
    assert make_codec(CompressConfig()) is None
    assert isinstance(make_codec(CompressConfig(compress="topk:0.1")), TopKCodec)
    dgc = make_codec(CompressConfig(compress="dgc:0.5", dgc_warmup_epochs=0, dgc_clip=2.0))
    assert isinstance(dgc, DgcCodec)
    assert dgc.fraction() == 0.5


@pytest.mark.parametrize(
    ("compress", "told"),
    [
        ("int8", None),
        ("dgc", "1 of 3 parameters, 97 % of all numbers; the others travel whole"),
        ("powersgd:4", "1 of 3 parameters, 97 % of all numbers; the others travel whole"),
        ("powersgd:100000", "none of 3 parameters is compressed, as none would gain by it: gradients travel whole"),
    ],
)
def test_how_much_of_a_model_is_compressed_is_told(compress: str, told: str | None) -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 3), nn.Linear(9000, 9000, bias=False, device="meta"))
    model[2].requires_grad_(False)
    model[1].bias = None
    codec = make_codec(CompressConfig(compress=compress))
    assert codec is not None
    assert extent(codec, dict(model.named_parameters())) == told


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"momentum": 0.9, "dampening": 0.1}, "dampening=0.1 .*use dampening=0"),
        ({"maximize": True}, "maximize=True .*negate the loss"),
        ({"differentiable": True}, "use differentiable=False"),
    ],
)
def test_kinds_of_sgd_that_cannot_work_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        attached(DgcCodec(), {"w": weight(2, 2)}, **options)


def test_other_optimizers_are_refused_with_the_reason_and_the_fix() -> None:
    parameters = {"w": weight(2, 2)}
    with pytest.raises(ValueError, match=r"not with AdamW: it applies momentum .* use torch.optim.SGD, or"):
        DgcCodec().attach(parameters, torch.optim.AdamW(parameters.values()))


def test_one_worker_refuses_what_several_would(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    with argosy.init("compress=dgc", run_folder=tmp_path) as fleet, pytest.raises(ValueError, match=r"torch.optim.SGD"):
        fleet.distribute(net, torch.optim.Adam(net.parameters()))


def test_an_optimizer_that_was_not_given_is_asked_for() -> None:
    with pytest.raises(RuntimeError, match=r"give it to fleet.distribute together with the model"):
        DgcCodec().reduce(bucket_of(w=torch.ones(2, 2)), Mirrors(2))  # type: ignore[arg-type]


def test_sgd_steps_without_momentum_and_has_it_back_after() -> None:
    parameters = {"w": weight(4, 4), "b": weight(4)}
    codec = DgcCodec()
    optimizer = torch.optim.SGD(
        [{"params": [parameters["w"]], "weight_decay": 0.5}, {"params": [parameters["b"]]}], lr=1.0, momentum=0.9
    )
    codec.attach(parameters, optimizer)
    codec.attach(parameters, optimizer)  # once more does no harm
    before = {name: p.detach().clone() for name, p in parameters.items()}
    for p in parameters.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(torch.equal(p, before[name] - 1) for name, p in parameters.items())
    assert optimizer.state_dict()["state"] in ({}, {0: {"momentum_buffer": None}, 1: {"momentum_buffer": None}})
    assert [(g["momentum"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.9, 0.5), (0.9, 0)]


def test_models_with_a_codec_each_may_share_an_optimizer() -> None:
    names = ("one", "two")
    parameters = {name: weight(2, 2) for name in names}
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0, momentum=0.9, weight_decay=0.1)
    codecs = {name: DgcCodec() for name in names}
    for name, codec in codecs.items():
        codec.attach({name: parameters[name]}, optimizer)
    for _ in range(2):
        for parameter in parameters.values():
            parameter.grad = torch.ones(2, 2)
        before = {name: p.detach().clone() for name, p in parameters.items()}
        optimizer.step()
        for name, parameter in parameters.items():
            assert torch.equal(parameter.detach(), before[name] - 1.0), "SGD has applied momentum or decay"
        (group,) = optimizer.param_groups
        assert (group["momentum"], group["weight_decay"]) == (0.9, 0.1)
        assert all(
            (codec._rule(name).momentum, codec._rule(name).decay) == (0.9, 0.1) for name, codec in codecs.items()
        )


def test_a_step_that_raises_loses_no_hyperparameter() -> None:
    parameters = {"w": weight(4, 4)}
    codec = DgcCodec()
    optimizer = attached(codec, parameters, momentum=0.9, weight_decay=0.1)

    def fails() -> float:
        raise KeyError("batch")

    for _ in range(2):
        with pytest.raises(KeyError, match="batch"):
            optimizer.step(fails)
    (group,) = optimizer.state_dict()["param_groups"]
    assert (group["momentum"], group["weight_decay"]) == (0.9, 0.1)
    optimizer.step()
    assert optimizer.param_groups[0]["momentum"] == 0.9


def test_gradients_reduced_inside_a_step_have_momentum() -> None:
    """`optimizer.step(closure)` runs backward, and so the codec, while the optimizer's own momentum is set aside."""
    parameters = {"b": nn.Parameter(torch.zeros(3))}
    codec = DgcCodec()
    optimizer = attached(codec, parameters, lr=1.0, momentum=0.5)

    def closure() -> float:
        bucket = bucket_of(b=torch.ones(3) / 2)
        codec.reduce(bucket, Mirrors(2))  # type: ignore[arg-type]
        parameters["b"].grad = bucket.flat
        return 0.0

    for _ in range(3):
        optimizer.step(closure)
    assert parameters["b"].tolist() == [-(1 + 1.5 + 1.75)] * 3


def test_changed_momentum_and_loaded_groups_are_seen() -> None:
    parameters = {"b": nn.Parameter(torch.zeros(1))}
    codec = DgcCodec()
    optimizer = attached(codec, parameters, momentum=0.5)
    totals = []
    for momentum in (0.5, 0.9, 0.0, 0.5):
        state = optimizer.state_dict()
        state["param_groups"][0]["momentum"] = momentum
        optimizer.load_state_dict(state)
        codec.begin_step(9)
        bucket = bucket_of(b=torch.ones(1) / 2)
        codec.reduce(bucket, Mirrors(2))  # type: ignore[arg-type]
        optimizer.step()
        totals.append(round(float(bucket.flat), 4))
    assert totals == [1.0, 1.9, 1.0, 1.0]


def test_a_second_gradient_before_the_step_is_refused() -> None:
    codec, group = DgcCodec(warmup_epochs=0), Mirrors(2)
    optimizer = attached(codec, {"b": nn.Parameter(torch.zeros(3)), "other": nn.Parameter(torch.zeros(3))})
    codec.reduce(bucket_of(b=torch.ones(3)), group)  # type: ignore[arg-type]
    codec.reduce(bucket_of(other=torch.ones(3)), group)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"another gradient of b before the optimizer's step.*fleet\.no_sync\(\)"):
        codec.reduce(bucket_of(b=torch.ones(3)), group)  # type: ignore[arg-type]
    codec.abort()  # a pass that has failed is not one to be added to
    codec.reduce(bucket_of(b=torch.ones(3)), group)  # type: ignore[arg-type]
    optimizer.step()
    codec.reduce(bucket_of(b=torch.ones(3)), group)  # type: ignore[arg-type]


def test_warm_up_without_epochs_is_refused() -> None:
    DgcCodec(warmup_epochs=0).begin_step(None)
    with pytest.raises(RuntimeError, match="dgc_warmup_epochs=4 counts epochs of a distributed DataLoader"):
        DgcCodec().begin_step(None)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_of_a_run_without_dgc_goes_on(nesterov: bool) -> None:
    """SGD alone for three steps, then DGC that sends everything: as if SGD had gone on."""
    start = {"w": torch.randn(256, 256), "b": torch.randn(7)}
    gradients = [{name: torch.randn_like(value) for name, value in start.items()} for _ in range(6)]
    results = []
    for switch in (3, 6):
        parameters = {name: nn.Parameter(value.clone()) for name, value in start.items()}
        optimizer = torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9, nesterov=nesterov)
        codec, group = DgcCodec(sparsity=0.0, warmup_epochs=0), Mirrors(2)
        for step, gradient in enumerate(gradients):
            if step == switch:
                codec.attach(parameters, optimizer)
                codec.load_state_dict({}, group)  # type: ignore[arg-type]
            bucket = bucket_of(**{name: value / 2 for name, value in gradient.items()})
            if step >= switch:
                codec.reduce(bucket, group)  # type: ignore[arg-type]
                gradient = {p.name: bucket.flat[p.begin : p.end].view(p.shape) for p in bucket.parts}
            for name, parameter in parameters.items():
                parameter.grad = gradient[name].clone()
            optimizer.step()
        results.append(parameters)
    for name in start:
        torch.testing.assert_close(results[0][name], results[1][name])


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_of_a_run_with_dgc_goes_on_without_it(nesterov: bool) -> None:
    """DGC that sends everything for three steps, then SGD alone: as if SGD had been alone from the start."""
    start = {"w": torch.randn(256, 256), "b": torch.randn(7)}
    gradients = [{name: torch.randn_like(value) for name, value in start.items()} for _ in range(6)]
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov}
    expected = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    parameters = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    alone = torch.optim.SGD(expected.values(), **options)
    codec, group = DgcCodec(sparsity=0.0, warmup_epochs=0), Mirrors(2)
    optimizer = attached(codec, parameters, **options)
    for step, gradient in enumerate(gradients):
        if step == 3:
            state = codec.state_dict(group)  # type: ignore[arg-type]
            optimizer = torch.optim.SGD(parameters.values(), **options)
            return_momenta(parameters, [optimizer], {**state["velocity"], **state["whole"]})
        bucket = bucket_of(**{name: value / 2 for name, value in gradient.items()})
        if step < 3:
            codec.reduce(bucket, group)  # type: ignore[arg-type]
        for part in bucket.parts:
            expected[part.name].grad = gradient[part.name].clone()
            reduced = bucket.flat[part.begin : part.end].view(part.shape).clone()
            parameters[part.name].grad = reduced if step < 3 else gradient[part.name].clone()
        alone.step()
        optimizer.step()
    for name in start:
        torch.testing.assert_close(parameters[name], expected[name])


@pytest.mark.parametrize("size", [2, 4])
def test_each_tensors_share_is_clipped_to_its_part_of_the_threshold(size: int) -> None:
    codec = DgcCodec(0, 0, clip=1.0)
    attached(codec, {"w": weight(128, 128), "b": weight(100), "small": weight(1)})
    share = {"w": torch.ones(128, 128), "b": torch.ones(100), "small": torch.full((1,), 0.1)}
    bucket = bucket_of(**share)
    codec.reduce(bucket, Mirrors(size))  # type: ignore[arg-type]
    for part, clipped in zip(bucket.parts, (True, True, False), strict=True):
        total = bucket.flat[part.begin : part.end]
        norm = size * size**-0.5 if clipped else 0.1 * size
        assert float(total.norm()) == pytest.approx(norm, rel=1e-5)


def test_only_large_matrices_are_sparse() -> None:
    codec = DgcCodec(0.999, 0, exchange="sparse")
    shapes = {"large": (128, 128), "conv": (32, 64, 3, 3), "small": (127, 129), "long": (20_000,)}
    attached(codec, {name: weight(*shape) for name, shape in shapes.items()})
    bucket = bucket_of(**{name: torch.randn(shape) for name, shape in shapes.items()})
    codec.reduce(bucket, Mirrors(2))  # type: ignore[arg-type]
    full = {part.name: bool((bucket.flat[part.begin : part.end] != 0).all()) for part in bucket.parts}
    assert full == {"large": False, "conv": False, "small": True, "long": True}
    assert codec.bytes_sent == 6 * (16 + 18) + 4 * (127 * 129 + 20_000)


@pytest.mark.parametrize(
    ("size", "gbits", "epoch", "done"),
    [
        (2, 1.0, 0, ["all_gather"]),  # a quarter of it, 6 bytes each instead of 4, to one peer
        (8, 1.0, 0, ["all_reduce"]),  # the same to seven peers
        (8, 1.0, 4, ["all_gather"]),
        (64, 0.1, 4, ["all_gather"]),
        (2, None, 0, ["all_reduce"]),  # in shared memory, looking for what is large takes longer than summing
        (2, None, 4, ["all_gather"]),
    ],
)
def test_the_cost_model_says_when_sparse_pays(size: int, gbits: float | None, epoch: int, done: list[str]) -> None:
    group = Mirrors(size, gbits)
    codec = DgcCodec()
    attached(codec, {"w": weight(512, 512)})
    codec.begin_step(epoch)
    codec.reduce(bucket_of(w=torch.randn(512, 512)), group)  # type: ignore[arg-type]
    assert group.done == done


def test_bytes_are_a_small_part_of_dense() -> None:
    shapes = {"a": (1024, 1024), "bias": (1024,), "b": (256, 1024)}
    codec = DgcCodec(0.999, 0, exchange="sparse")
    attached(codec, {name: weight(*shape) for name, shape in shapes.items()})
    bucket = bucket_of(**{name: torch.randn(shape) for name, shape in shapes.items()})
    codec.reduce(bucket, Mirrors(2))  # type: ignore[arg-type]
    assert codec.bytes_sent - 4 * 1024 <= 4 * bucket.flat.numel() / 600


def test_a_checkpoint_of_another_model_is_refused() -> None:
    codec = TopKCodec(0.01, "sparse")
    codec.load_state_dict({"rest": {"w": torch.ones(7)}, "velocity": {}}, Mirrors(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"kept of w has 7 numbers, and its gradient 2000"):
        codec.reduce(bucket_of(w=torch.ones(2000)), Mirrors(2))  # type: ignore[arg-type]
