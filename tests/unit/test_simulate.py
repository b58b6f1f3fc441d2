"""`argosy simulate` tells what the cost model computes."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from argosy.cli.main import app
from argosy.comm.algorithms.catalogue import ALGORITHMS
from argosy.comm.cost import simulate
from argosy.comm.schedule import Collective
from argosy.comm.topology import Link, Topology


def told(*words: str) -> str:
    done = CliRunner().invoke(app, ["simulate", *words], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    return done.output


def test_the_table_has_every_algorithm_with_its_time() -> None:
    shown = told("allreduce", "--ranks", "12", "--per-host", "4", "--bytes", "8MiB", "--gbits", "10")
    topology = Topology.uniform(12, 4, Link(1e-6, 5e9), Link.ethernet(10, 30e-6), 10e9)
    for name, algorithm in ALGORITHMS[Collective.ALL_REDUCE].items():
        seconds = simulate(algorithm(topology), topology, 8 * 2**20)
        assert re.search(rf"{name} .*{seconds * 1e3:.3g} ms", shown), name


def test_the_plot_has_a_letter_for_each_algorithm() -> None:
    shown = told("all-gather", "--ranks", "8")
    assert "A ring   B halving_doubling" in shown
    assert shown.count("1G") == 1
    assert len(re.findall(r"^ .*\|.*A", shown, flags=re.MULTILINE)) > 3


def test_algorithms_that_do_not_suit_are_left_out() -> None:
    assert "halving_doubling" not in told("reducescatter", "--ranks", "6")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gather"], "expected one of allreduce"),
        (["allreduce", "--bytes", "lots"], "expected a size such as"),
        (["allreduce", "--ranks", "0"], "--ranks 0"),
        (["allreduce", "--gbits", "-1"], "--gbits -1"),
    ],
)
def test_a_mistake_is_told(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["simulate", *words], env={"COLUMNS": "160"})
    assert done.exit_code == 2
    assert said in re.sub(r"\s+", " ", done.output.replace("│", " "))
