"""The examples for the parameter server learn, unchanged in one process and with servers."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from launching import FORKED, run, succeed

EXAMPLES = Path(__file__).parents[2] / "examples"
LINES = {
    "ratings.csv": ("userId,movieId,rating,timestamp\n", "{},{},{},964982703\n"),
    "ratings.dat": ("", "{}::{}::{}::964982703\n"),
    "u.data": ("", "{}\t{}\t{}\t964982703\n"),
}
SERVED = [*FORKED, "run", "--servers", "2", "--workers", "2", "--run-folder", "run", "--strategy"]


@pytest.mark.parametrize("strategy", ["", "ps=async"])
def test_clicks_are_learnt_and_the_best_auc_is_known(tmp_path: Path, strategy: str) -> None:
    words = [*SERVED, strategy] if strategy else [*FORKED, "run", "--run-folder", "run"]
    succeed([*words, EXAMPLES / "ctr.py", "--rows", "40000"])
    told = json.loads(Path("run/result.json").read_text())
    assert 0.70 < told["auc"] < told["best_auc"]
    assert told["best_auc"] == pytest.approx(0.80, abs=0.02)
    assert 5_000 < told["rows"] < 14_000


@pytest.mark.parametrize("name", LINES)
def test_ratings_are_read_as_movielens_has_them(tmp_path: Path, name: str) -> None:
    head, line = LINES[name]
    given = [
        (user, user + film, stars) for user, film, stars in zip(range(1, 13), range(90, 102), [4, 3.5] * 6, strict=True)
    ]
    (tmp_path / name).write_text(head + "".join(line.format(*rating) for rating in given))
    read = runpy.run_path(str(EXAMPLES / "movielens.py"))["Ratings"].read(tmp_path / name)
    assert list(zip(read.users.tolist(), read.films.tolist(), read.stars.tolist(), strict=True)) == given


def test_ratings_are_learnt(tmp_path: Path) -> None:
    succeed([*SERVED, "ps=async", EXAMPLES / "movielens.py", "--epochs", "1"])
    told = json.loads(Path("run/result.json").read_text())
    assert told["rmse"] < 0.7 * told["rmse_of_mean"]


def test_a_line_that_is_no_rating_is_named(tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_text("1::2::3::4\n1::2::many::4\n")
    done = run([sys.executable, EXAMPLES / "movielens.py", "--ratings", tmp_path / "ratings.dat"])
    assert done.status == 1
    assert "ratings.dat, line 2: not a rating: '1::2::many::4'" in done.err
