"""The mesh: sizes that fit the workers, ranks laid out by host, who reads what, and the picture of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from argosy.config import ConfigError
from argosy.parallel.mesh import Mesh
from argosy.parallel.mesh_config import MeshConfig, Sizes
from argosy.strategy import Strategy


@pytest.mark.parametrize(
    ("line", "workers", "sizes"),
    [
        ("", 4, Sizes(data=4)),
        ("data=4", 4, Sizes(data=4)),
        ("shard_stage=1", 4, Sizes(shard=4)),
        ("shard=2", 4, Sizes(data=2, shard=2)),
        ("data=2 shard_stage=3", 8, Sizes(data=2, shard=4)),
        ("tensor=2", 8, Sizes(data=4, tensor=2)),
        ("tensor=2 shard_stage=2 pipeline=2", 8, Sizes(pipeline=2, shard=2, tensor=2)),
        ("pipeline=2", 2, Sizes(pipeline=2)),
        ("pipeline=[3,1]", 4, Sizes(pipeline=2, turns=(3, 1))),
    ],
)
def test_an_axis_that_is_left_out_takes_the_workers_that_remain(line: str, workers: int, sizes: Sizes) -> None:
    assert Strategy.parse(line).part(MeshConfig).sizes(workers) == sizes
    assert sizes.workers == workers


@pytest.mark.parametrize(
    ("line", "workers", "said"),
    [
        ("data=2", 4, "data=2: the mesh needs 2 workers and the job has 4; say data=4, leave data out, or start 2"),
        ("tensor=3", 4, "tensor=3: the mesh needs a multiple of 3 workers and the job has 4"),
        ("data=2 tensor=2", 8, "data=2: the mesh needs 4 workers and the job has 8; leave data out, or start 4"),
        ("pipeline=2 data=1 shard=1 tensor=2", 8, "tensor=2: the mesh needs 4 workers and the job has 8"),
        ("data=2 shard_stage=3", 2, "shard_stage=3: the other axes leave no workers to shard over"),
        ("pipeline=[3,1]", 5, "pipeline=[3,1]: the mesh needs 4 workers and the job has 5"),
    ],
)
def test_a_mesh_that_does_not_fit_says_how_many_it_needs(line: str, workers: int, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Strategy.parse(line).check_workers(workers)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("shard=0", "an axis has at least 1 worker"),
        ("tensor=0", "an axis has at least 1 worker"),
        ("pipeline=0", "has at least 1 worker"),
        ("pipeline=[3,0]", "each stage, has at least 1 worker"),
        ("pipeline=[3]", "for equal stages say pipeline=3"),
        ("pipeline=[3,1] tensor=2", "replicas of their own, and no other axis"),
        ("pipeline=[3,1] shard_stage=1", "are not sharded"),
        ("pipeline=[3,x]", "a whole number or a list of whole numbers such as [3,1]"),
        ("shard_stage=4", "expected 1 (optimizer states), 2 (and gradients) or 3 (and parameters)"),
        ("shard=1 shard_stage=2", "needs workers to shard over"),
    ],
)
def test_meshes_that_no_job_could_have_are_refused(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Strategy.parse(line)
    assert said in str(caught.value)


@settings(derandomize=True, deadline=None)
@given(
    sizes=st.builds(Sizes, *[st.integers(1, 3)] * 4),
    hosts=st.lists(st.integers(0, 3), min_size=81, max_size=81),
)
def test_every_worker_has_a_place_and_neighbours_are_as_near_as_can_be(sizes: Sizes, hosts: list[int]) -> None:
    mesh = Mesh.of(sizes, hosts[: sizes.workers])
    places = [mesh.place(rank) for rank in range(sizes.workers)]
    assert len(set(places)) == sizes.workers
    readers = [mesh.reader(rank) for rank in range(sizes.workers)]
    assert set(readers) == set(range(mesh.readers))
    for rank, place in enumerate(places):
        same = [other for other in range(sizes.workers) if readers[other] == readers[rank]]
        assert len(same) == sizes.tensor * sizes.pipeline
        assert all(places[other][1:3] == place[1:3] for other in same)
    groups = [mesh.order[begin : begin + sizes.tensor] for begin in range(0, sizes.workers, sizes.tensor)]
    crossing = sum(len({mesh.hosts[rank] for rank in group}) > 1 for group in groups)
    assert crossing <= len(set(mesh.hosts)) - 1  # no more than there are borders between hosts


def test_replicas_of_unequal_stages_see_the_same_samples() -> None:
    mesh = Mesh.of(Sizes(pipeline=2, turns=(3, 1)), [0] * 4)
    assert [mesh.place(rank) for rank in range(4)] == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert mesh.readers == 1
    assert {mesh.reader(rank) for rank in range(4)} == {0}


def test_the_picture_shows_which_rank_does_what() -> None:
    assert Mesh.of(Sizes(data=4), [0] * 4).picture() == []
    assert Mesh.of(Sizes(pipeline=2, data=2, tensor=2), [0] * 8).picture() == [
        "mesh of 8 workers = 2 pipeline x 2 data x 2 tensor",
        "           stage 0      stage 1",
        "           tensor 0 1   tensor 0 1",
        "  data 0   rank   0 1   rank   4 5",
        "  data 1   rank   2 3   rank   6 7",
    ]
    assert Mesh.of(Sizes(pipeline=2, turns=(3, 1)), [0] * 4).picture()[1:] == [
        "  stage 0   ranks 0, 1, 2",
        "  stage 1   rank 3",
    ]
    assert Mesh.of(Sizes(tensor=3), [0, 0, 1]).picture()[-1] == "tensor neighbours on different hosts: 0, 1, 2"
    assert len(Mesh.of(Sizes(data=64, shard=2), [0] * 128).picture()) < 25
