"""What codecs have kept goes with a checkpoint: it is loaded, handed to another codec, or dropped, never left over."""

from __future__ import annotations

import pytest
import torch
from ranks import Place, run
from together import batch, large_net, squares

from argosy.comm.engine import EngineGroup
from argosy.data.cursor import Cursor
from argosy.parallel.mesh import Mesh
from argosy.parallel.mesh_config import Sizes
from argosy.parallel.training import Training
from argosy.parallel.training_config import TrainingConfig


def trained(compress: str, group: EngineGroup) -> Training:
    """After a few steps, in which a codec keeps something."""
    warmup = {"dgc_warmup_epochs": 0} if compress.startswith("dgc") else {}
    config = TrainingConfig(compress=compress, **warmup)
    mesh = Mesh.of(Sizes(data=group.size), group.hosts)
    training = Training(config, mesh, 0, group, Cursor(), 1, lambda *_, **__: None, lambda _: None)
    model = large_net()
    training.add_model(model, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training.add_optimizer(optimizer)
    for step in range(3):
        optimizer.zero_grad()
        squares(model, batch(10 * step + group.rank)).backward()
        optimizer.step()
    return training


def kept(training: Training) -> float:
    """The size of everything that is kept and belongs to earlier parameters."""
    (codec,) = training.state_dict()["codecs"]
    kinds = [codec["kept"].get(kind, {}) for kind in ("residual", "rest", "velocity", "whole")]
    return float(sum(value.abs().sum() for kind in kinds for value in kind.values()))


def check(place: Place) -> None:
    group = place.join()
    states = {name: trained(name, group).state_dict() for name in ("none", "int8", "dgc:0.9")}
    for name in ("int8", "sign", "powersgd:2", "topk:0.01", "dgc:0.9"):
        training = trained(name, group)
        assert kept(training) > 0
        training.load_state_dict(states["none"])
        assert kept(training) == 0, name
        training.close()
    handed = trained("powersgd:2", group)
    handed.load_state_dict(states["int8"])
    before = states["int8"]["codecs"][0]["kept"]["residual"]
    torch.testing.assert_close(handed.state_dict()["codecs"][0]["kept"]["residual"], before)
    other = trained("dgc:0.9", group)
    with pytest.warns(UserWarning, match="of compress=int8: compress=dgc:0.9 leaves out what it has held back"):
        other.load_state_dict(states["int8"])
    assert kept(other) == 0
    with pytest.warns(UserWarning, match="of compress=dgc:0.9: a job that compresses nothing leaves out what it has"):
        trained("none", group).load_state_dict(states["dgc:0.9"])
    check_scales(group)
    group.close()


def scaled(compress: str, precision: str, group: EngineGroup) -> Training:
    """The same, by whole steps; a loss that is scaled by 2^16 overflows at first, so that its scale changes."""
    mesh = Mesh.of(Sizes(data=group.size), group.hosts)
    config = TrainingConfig(compress=compress, precision=precision)
    training = Training(config, mesh, 0, group, Cursor(), 1, lambda *_, **__: None, lambda _: None)
    model = large_net()
    training.add_model(model, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    training.add_optimizer(optimizer)
    for _ in range(6):
        x = batch(group.rank)
        training.step(model, optimizer, x, torch.zeros(len(x)), lambda out, _: out.square().mean() * 100, None)
    return training


def check_scales(group: EngineGroup) -> None:
    """What is kept is the same whatever the loss was scaled by, and serves jobs that scale it otherwise."""
    for name in ("int8", "sign", "powersgd:2", "topk:0.01"):
        plain, half = scaled(name, "fp32", group), scaled(name, "fp16", group)
        assert 0.3 < kept(half) / kept(plain) < 3, name
        state = half.state_dict()
        assert state["precision"]["factor"] < 2**16, "it did not overflow"
        before = kept(half)
        plain.load_state_dict(state)
        assert kept(plain) == pytest.approx(before, rel=1e-6)
        half.load_state_dict(state)
        assert kept(half) == pytest.approx(before, rel=1e-6)
        plain.close()
        half.close()


def test_codecs_follow_a_checkpoint() -> None:
    run(check, 2)
