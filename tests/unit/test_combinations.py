"""Choices that do not go together are refused before anything starts, by the field that has to change."""

from __future__ import annotations

import pytest

from argosy.config import ConfigError
from argosy.strategy import Strategy

REFUSED = [
    # what cannot work on any number of workers
    ("accumulate=2 sync=local:4", 2, "accumulate=2: sync=local:4 has no gradients to reduce less often"),
    # models that no worker holds whole
    ("sync=local:4 shard_stage=3", 2, "sync=local:4: replicas that train alone hold whole models"),
    ("sync=local:4 tensor=2", 4, "sync=local:4: replicas that train alone hold whole models"),
    ("sync=local:4 pipeline=2", 4, "sync=local:4: replicas that train alone hold whole models"),
    ("compress=int8 data=2 shard_stage=3", 4, "compress=int8: codecs but bf16 act between workers that hold"),
    ("compress=powersgd:2 tensor=2", 4, "compress=powersgd:2: codecs but bf16 act between"),
    ("compress=powersgd shard_stage=3", 4, "compress=powersgd: codecs but bf16 act between"),
    ("compress=fp16 shard_stage=2", 2, "compress=fp16: codecs but bf16 act between"),
    ("compress=bf16 tensor=2", 2, "compress=bf16: it is for gradients that travel along data= and shard="),
    ("compress=bf16 pipeline=[3,1]", 4, "compress=bf16: it is for gradients that travel along data= and shard="),
    ("compress=dgc pipeline=2", 4, "compress=dgc: codecs but bf16 act between"),
    ("precision=fp16 shard_stage=3", 2, "precision=fp16: .* use precision=bf16"),
    ("precision=fp16 tensor=2", 2, "precision=fp16: .* use precision=bf16"),
    ("precision=fp16 pipeline=2", 2, "precision=fp16: .* use precision=bf16"),
    ("sync_batchnorm=true tensor=2", 4, "sync_batchnorm=true: .* between workers that hold whole models"),
    ("sync_batchnorm=true pipeline=2", 4, "sync_batchnorm=true: .* between workers that hold whole models"),
    ("sync_batchnorm=true shard_stage=3", 2, "sync_batchnorm=true: .* between workers that hold whole models"),
    ("balance=true tensor=2", 4, "balance=true: .* several workers compute one share together"),
    ("balance=true shard_stage=2", 2, "balance=true: .* layer by layer .* use shard_stage=1"),
    ("balance=true pipeline=[3,1]", 4, "balance=true: .* several workers compute one share together"),
    # sharded states
    ("shard_stage=1 tensor=2", 4, "shard_stage=1: .* use shard_stage=2"),
    ("shard_stage=1 pipeline=2", 4, "shard_stage=1: .* use shard_stage=2"),
    ("shard_stage=1 compress=dgc", 2, "compress=dgc: DGC keeps the momentum itself"),
    ("shard_stage=1 sync=local:4", 2, "sync=local:4: .* sharded states step together"),
    # pipelines
    ("pipeline=2 average=ema:0.9", 2, "average=ema:0.9: a pipeline's workers hold different layers"),
    ("pipeline=2 recompute=auto", 2, "recompute=auto: .* no worker has all; use every:1"),
    ("sync_batchnorm=true recompute=auto", 2, "recompute=auto: .* gathers statistics again"),
    ("tensor=2 recompute=auto", 2, "recompute=auto: .* compute it again together; use every:1"),
    ("pipeline=2 schedule=zero-bubble data=2", 4, "schedule=zero-bubble: .* 2 replicas .* use schedule=interleaved"),
    ("pipeline=2 schedule=zero-bubble shard=2", 4, "schedule=zero-bubble: .* 2 replicas .* use schedule=interleaved"),
    ("pipeline=2 tensor=2 schedule=zero-bubble shard_stage=3", 16, "schedule=zero-bubble: .* 4 replicas"),
    ("pipeline=2 tensor=2 schedule=zero-bubble", 8, "schedule=zero-bubble: .* 2 replicas"),
    ("pipeline=2 tensor=2 micro_batches=1", 4, "micro_batches=1: schedule=1f1b keeps 2 workers busy"),
    ("pipeline=[3,1] accumulate=2", 4, "accumulate=2: .* use more micro_batches"),
    ("pipeline=[3,1] schedule=gpipe", 4, r"schedule=gpipe: stages of different sizes, pipeline=\[3,1\], have an order"),
    ("pipeline=[3,1] micro_batches=2", 4, "micro_batches=2: a stage has 3 workers that take turns; say 3 or more"),
    ("pipeline=[3,1] split=a,b", 4, r"split=a,b: pipeline=\[3,1\] has 2 stages, so 1 modules begin a new one"),
    # what would be ignored
    ("shard_modules=blocks.*", 2, r"shard_modules=blocks.\*: it is for shard_stage=2 and 3"),
    ("pipeline=2 shard=2 shard_modules=blocks.*", 4, r"shard_modules=blocks.\*: stages are sharded by the size"),
    ("shard_stage=1 shard_modules=blocks.*", 2, r"shard_modules=blocks.\*: it is for shard_stage=2 and 3"),
    ("offload=true", 2, "offload=true: it moves sharded optimizer states"),
    ("tensor_plan=fc:column", 2, "tensor_plan=fc:column: it is for tensor=2 or more"),
    ("sequence_parallel=true pipeline=2", 2, "sequence_parallel=true: it is for tensor=2 or more"),
    ("schedule=gpipe", 2, "schedule=gpipe: it is for pipeline=2 or more"),
    ("micro_batches=4 tensor=2", 2, "micro_batches=4: it is for pipeline=2 or more"),
    ("split=blocks.2 data=2", 2, "split=blocks.2: it is for pipeline=2 or more"),
    ("bucket_mbytes=8 shard_stage=3", 2, "bucket_mbytes=8.*: gradients are not gathered in buckets"),
    ("bucket_mbytes=8 sync=local:4", 2, "bucket_mbytes=8.*: gradients are not gathered in buckets"),
    ("bucket_mbytes=8 tensor=2", 4, "bucket_mbytes=8.*: gradients are not gathered in buckets"),
]

TAKEN = [
    ("accumulate=2 compress=dgc", 2),
    ("shard_stage=1 compress=int8 bucket_mbytes=8", 2),
    ("shard_stage=3 compress=bf16", 1),
    ("data=2 tensor=2 compress=bf16", 4),
    ("data=2 pipeline=2 shard=2 shard_stage=3 compress=bf16", 8),
    ("shard_stage=3 precision=bf16", 2),
    ("shard_stage=1 balance=true", 2),
    ("shard_stage=1 sync_batchnorm=true", 2),
    ("shard_stage=3 recompute=auto average=ema:0.9", 2),
    ("data=2 tensor=2 shard_stage=2 sequence_parallel=true precision=bf16", 8),
    ("pipeline=2 schedule=zero-bubble", 2),
    ("pipeline=2 tensor=2 schedule=zero-bubble", 4),
    ("pipeline=2 tensor=2 sequence_parallel=true recompute=every:2 accumulate=2", 4),
    ("pipeline=2 tensor=2 data=2 schedule=interleaved precision=bf16", 8),
    ("pipeline=2 tensor=2 shard_stage=3 schedule=gpipe micro_batches=1", 8),
    ("pipeline=[3,1] micro_batches=6", 4),
]


@pytest.mark.parametrize(("line", "workers", "said"), REFUSED, ids=[line for line, *_ in REFUSED])
def test_what_does_not_go_together_is_refused_before_start(line: str, workers: int, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        Strategy.parse(line).check_workers(workers)


@pytest.mark.parametrize(("line", "workers"), TAKEN, ids=[line for line, _ in TAKEN])
def test_what_goes_together_is_taken(line: str, workers: int) -> None:
    Strategy.parse(line).check_workers(workers)
