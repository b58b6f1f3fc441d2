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
    with pytest.warns(UserWarning, match="of compress=dgc:0.9: a job that compresses nothing leaves out the momentum"):
        trained("none", group).load_state_dict(states["dgc:0.9"])
    group.close()


def test_codecs_follow_a_checkpoint() -> None:
    run(check, 2)
