"""What may be chosen about the parameter server, and what is refused, by the field that has to change."""

from __future__ import annotations

import pytest

from argosy.config import ConfigError
from argosy.ps.config import Consistency, PsConfig
from argosy.strategy import Strategy


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("none", Consistency("none")),
        ("sync", Consistency("sync")),
        ("async", Consistency("async")),
        ("async:dc", Consistency("async", compensated=True)),
        ("ssp:0", Consistency("ssp", 0)),
        ("ssp:4", Consistency("ssp", 4)),
        ("half-async:3", Consistency("half-async", 3)),
        ("geo:50", Consistency("geo", 50)),
    ],
)
def test_consistencies_are_read(text: str, means: Consistency) -> None:
    assert PsConfig(ps=text).consistency() == means
    assert means.is_asynchronous == (means.kind not in ("none", "sync"))


@pytest.mark.parametrize("text", ["", "maybe", "sync:2", "none:1", "async:", "async:3", "async:dc:2", "Async"])
def test_what_is_no_consistency_is_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^ps=.*: expected none, sync, async, async:dc, ssp:4, half-async:4 or geo:50"
    ):
        PsConfig(ps=text)


@pytest.mark.parametrize("text", ["ssp", "ssp:", "ssp:-1", "ssp:x", "ssp:1.5", "half-async:0", "geo", "geo:0", "geo:²"])
def test_a_number_of_steps_must_be_one(text: str) -> None:
    kind = text.partition(":")[0]
    with pytest.raises(ConfigError, match=f"^ps={text}: {kind} takes a number of steps, [01] or more: ps={kind}:"):
        PsConfig(ps=text)


REFUSED = [
    # options of a parameter server without one
    ("dense=allreduce", 2, 0, "dense=allreduce: it is for a parameter server"),
    ("ps_values=int8", 2, 0, "ps_values=int8: it is for a parameter server"),
    ("not_finite=count", 2, 0, "not_finite=count: it is for a parameter server"),
    ("aggregate=2", 2, 0, "aggregate=2: it is for a parameter server"),
    ("lease_samples=100", 2, 0, "lease_samples=100: it is for a parameter server"),
    # options of another consistency
    ("ps=async aggregate=2", 4, 1, "aggregate=2: it is for ps=sync"),
    ("ps=sync aggregate=0", 4, 1, "aggregate=0: .* at least 1 worker"),
    ("ps=sync aggregate=5", 4, 1, "aggregate=5: .* 1 to 4"),
    ("ps=sync aggregate=3 dense=allreduce", 4, 1, "aggregate=3: dense=allreduce waits for all"),
    ("ps=sync lease_samples=64", 4, 1, "lease_samples=64: samples are taken by lease in asynchronous modes"),
    ("ps=async dense=allreduce lease_samples=64", 4, 1, "lease_samples=64: samples are taken by lease"),
    ("ps=async lease_samples=0", 4, 1, "lease_samples=0: .* at least 1 sample"),
    # servers
    ("ps=async", 4, 0, "ps=async: 4 workers meet at servers: start some with `argosy run --servers 1`"),
    ("", 4, 2, "ps=none: nothing would use the 2 of --servers"),
    # other ways to train
    ("ps=async shard_stage=3", 4, 1, "shard_stage=3: each worker computes whole models"),
    ("ps=async shard=4", 4, 1, "shard=4: each worker computes whole models"),
    ("ps=async tensor=2", 4, 1, "tensor=2: each worker computes whole models"),
    ("ps=sync pipeline=2", 4, 1, "pipeline=2: each worker computes whole models"),
    ("ps=async compress=int8", 4, 1, "compress=int8: .* ps_values=fp16 or int8"),
    ("ps=async sync=local:4", 4, 1, "sync=local:4: .* use ps=geo:50"),
    ("ps=async average=ema:0.9", 4, 1, "average=ema:0.9: "),
    ("ps=async precision=fp16", 4, 1, "precision=fp16: .* use precision=bf16"),
    ("ps=async sync_batchnorm=true", 4, 1, "sync_batchnorm=true: it meets in every step"),
    ("ps=async accumulate=2", 4, 1, "accumulate=2: .* larger batch_size"),
    ("ps=sync balance=true", 4, 1, "balance=true: "),
    ("ps=async lr_scale=linear", 4, 1, "lr_scale=linear: a server's optimizer has its own"),
    ("ps=sync warmup=5epochs", 4, 1, "warmup=5epochs: a server's optimizer has its own"),
    ("ps=async bucket_mbytes=8", 4, 1, "bucket_mbytes=8.*: gradients go to servers"),
    ("ps=async batch=global", 4, 1, "batch=global: each worker's batch is a step of its own"),
    ("ps=ssp:2 ramp=4:3epochs", 4, 1, "ramp=4:3epochs: each worker's batch is a step of its own"),
]

TAKEN = [
    ("ps=async", 4, 2),
    ("ps=async", 1, 0),
    ("ps=geo:50 lease_samples=1000 ps_values=int8 not_finite=count", 1, 1),
    ("ps=sync aggregate=3 batch=global", 4, 1),
    ("ps=sync aggregate=4 ramp=4:3epochs data=4", 4, 1),
    ("ps=async dense=allreduce bucket_mbytes=8 batch=global precision=bf16", 4, 2),
]


@pytest.mark.parametrize(("line", "workers", "servers", "said"), REFUSED, ids=[f"{e[0]}-{e[2]}" for e in REFUSED])
def test_what_does_not_go_together_is_refused_before_start(line: str, workers: int, servers: int, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        Strategy.parse(line).check_workers(workers, servers)


@pytest.mark.parametrize(("line", "workers", "servers"), TAKEN, ids=[f"{e[0]}-{e[1]}" for e in TAKEN])
def test_what_goes_together_is_taken(line: str, workers: int, servers: int) -> None:
    strategy = Strategy.parse(line)
    strategy.check_workers(workers, servers)
    assert Strategy.parse(strategy.to_line()) == strategy


@pytest.mark.parametrize(
    ("options", "needed", "gathered", "leases"),
    [
        ({"ps": "async"}, 1, 0, True),
        ({"ps": "geo:5"}, 1, 0, True),
        ({"ps": "async", "dense": "allreduce"}, 4, 0, False),
        ({"ps": "sync"}, 4, 4, False),
        ({"ps": "sync", "aggregate": 3}, 3, 3, False),
        ({}, 4, 0, False),
    ],
)
def test_who_must_live_and_what_is_gathered(options: dict, needed: int, gathered: int, leases: bool) -> None:
    config = PsConfig(**options)
    assert (config.needed(4), config.gathered(4), config.has_leases) == (needed, gathered, leases)
