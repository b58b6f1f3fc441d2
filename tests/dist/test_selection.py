"""Real workers measure their links, choose alike, and compute the same by every algorithm; `argosy doctor` shows it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from launching import ARGOSY, succeed
from ranks import Failed, Place, run, started

from argosy.comm.algorithms.catalogue import ALGORITHMS
from argosy.comm.schedule import Collective

SIZES = (64, 4 << 10, 1 << 20)


def choose_and_run(place: Place) -> Any:
    group = place.join()
    topology = group.measure_links()
    choices = [group.selector.choose(kind, size_bytes) for kind in Collective for size_bytes in SIZES]
    names = group.selector.names(Collective.ALL_REDUCE)
    for name in names:
        forced = place.join(name, algorithm=name)
        for size_bytes in SIZES:
            assert forced.selector.choose(Collective.ALL_REDUCE, size_bytes).name == name
            tensor = forced.empty(size_bytes // 4) + place.rank
            forced.all_reduce(tensor)
            assert torch.equal(tensor, torch.full_like(tensor, sum(range(place.size))))
        tensor = torch.full((4,), float(place.rank))
        forced.broadcast(tensor, 1)  # there is no ring for it, nor other things: one that there is runs
        assert tensor.tolist() == [1.0] * 4
        forced.close()
    group.close()
    return topology, choices, names


@pytest.mark.parametrize("hosts", ["aa", "ab", "aab", "abba"])
def test_ranks_choose_alike_and_every_algorithm_sums(hosts: str) -> None:
    told = run(choose_and_run, len(hosts), hosts=list(hosts))
    assert all(other == told[0] for other in told)
    topology, _, names = told[0]
    direct = ["direct"] if len({*hosts}) == 1 else []
    assert names == [*direct, *ALGORITHMS[Collective.ALL_REDUCE]]
    assert len({*topology.hosts}) == len({*hosts})
    for link in (topology.inside, topology.between):
        assert 0 < link.latency_seconds < 1
        assert 1e5 < link.bytes_per_second < 1e13


def join_direct(place: Place) -> None:
    place.join(algorithm="direct")


def test_an_algorithm_that_cannot_run_is_refused_when_joining() -> None:
    with started(join_direct, 2, hosts=["a", "b"]) as ranks:
        for result in ranks.results():
            assert isinstance(result, Failed)
            assert result.kind == "AlgorithmError"
            assert "the ranks are on 2 hosts, and it needs them on one; choose auto, ring" in result.message


def test_the_doctor_measures_with_real_workers() -> None:
    done = succeed([*ARGOSY, "doctor", "--workers", "3"], COLUMNS="140")
    assert "links of 3 workers on 1 host, as measured" in done.out
    for size in ("1 KiB", "64 KiB", "1 MiB", "64 MiB"):
        assert re.search(rf"all_reduce .* {size} .* direct .* [mun]s .* [mun]s .*all on one host; \w+ would", done.out)
