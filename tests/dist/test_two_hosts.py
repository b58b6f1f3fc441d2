"""Two hosts: two network namespaces joined by a veth pair, a launcher in each."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from forked import NAMESPACE
from launching import ARGOSY, FORKED, Started, alive, finish, free_port, pids, running, succeed, wait_for
from namespaces import two_hosts

SCRIPTS = Path(__file__).parent / "scripts"
FAULTY = Path(__file__).parents[1] / "fault" / "scripts" / "faulty.py"
COORDINATOR = "10.213.7.1:29571"


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    with two_hosts() as names:
        yield names


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "job.secret"
    succeed([*FORKED, "secret", file])
    assert file.stat().st_mode & 0o777 == 0o600
    return file


def launched(
    host: str, number: int, secret: Path, *words: str | Path, workers: int = 2, nodes: int = 2, real: bool = False
) -> AbstractContextManager[Started]:
    """A launcher on a host; `real` if in an interpreter of its own."""
    options = ["--workers", str(workers), "--nodes", str(nodes), "--node-rank", str(number)]
    command = ["run", *options, "--coordinator", COORDINATOR, "--secret-file", secret, *words]
    # Namespaces of one machine could share memory, which hosts cannot.
    if real:
        return running(["ip", "netns", "exec", host, *ARGOSY, *command], ARGOSY_HOST_ID=host)
    return running([*FORKED, *command], **{NAMESPACE: host, "ARGOSY_HOST_ID": host})


def test_hosts_are_what_the_user_says(secret: Path, tmp_path: Path) -> None:
    script = tmp_path / "hosts.py"
    script.write_text("import argosy\nfleet = argosy.init()\nprint('hosts', *fleet.group.hosts)\nfleet.close()\n")
    options = ["--workers", "2", "--nodes", "2", "--coordinator", f"127.0.0.1:{free_port()}", "--secret-file", secret]
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                running([*FORKED, "run", *options, "--node-rank", str(number), script], ARGOSY_HOST_ID=name)
            )
            for number, name in enumerate(("left", "right"))
        ]
        ends = [finish(node, deadline_seconds=60) for node in nodes]
    assert [end.status for end in ends] == [0, 0], [end.err for end in ends]
    assert all("hosts 0 0 1 1" in end.out + end.err for end in ends)


def test_training_on_two_hosts_is_training_on_one(hosts: tuple[str, str], secret: Path, tmp_path: Path) -> None:
    script = SCRIPTS / "scenarios.py"
    words = ["--strategy", "batch=global", script]
    # The second node starts first: it waits for the coordinator.
    with (
        launched(hosts[1], 1, secret, *words, tmp_path / "two", "plain_loop", workers=1, real=True) as second,
        launched(hosts[0], 0, secret, *words, tmp_path / "two", "plain_loop", real=True) as first,
    ):
        ends = [finish(process, deadline_seconds=90) for process in (first, second)]
    assert [end.status for end in ends] == [0, 0], [end.err for end in ends]
    succeed([*FORKED, "run", "--workers", "1", *words, tmp_path / "one", "plain_loop"])
    one = json.loads((tmp_path / "one" / "rank0.json").read_text())["plain_loop"]
    two = [json.loads((tmp_path / "two" / f"rank{rank}.json").read_text())["plain_loop"] for rank in range(3)]
    assert max(abs(a - b) for a, b in zip(one["losses"], two[0]["losses"], strict=True)) < 1e-5
    assert len({rank["state"] for rank in two}) == 1
    assert "[2] " not in ends[0].out + ends[0].err  # each launcher shows the ranks of its own host


def test_a_failure_on_one_host_ends_both(hosts: tuple[str, str], secret: Path, tmp_path: Path) -> None:
    words = (FAULTY, tmp_path, "raise", "3")
    with launched(hosts[0], 0, secret, *words) as one, launched(hosts[1], 1, secret, *words) as two:
        ends = [finish(process, deadline_seconds=60) for process in (one, two)]
    assert [end.status for end in ends] == [1, 1]
    for end in ends:
        assert "ValueError: the cargo has shifted" in end.err
        assert "rank 3 failed" in end.err
    assert "argosy: rank 2 stopped because rank 3 failed" in ends[1].err
    for rank in (0, 1):
        assert f"argosy: rank {rank} stopped because rank 3 failed" in ends[0].err
    assert not any(alive(pid) for pid in pids(tmp_path))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_launcher_that_is_killed_ends_the_other_host(
    hosts: tuple[str, str], secret: Path, tmp_path: Path, lost: int
) -> None:
    words = (FAULTY, tmp_path, "never")
    with (
        launched(hosts[0], 0, secret, *words, workers=1) as one,
        launched(hosts[1], 1, secret, *words, workers=1) as two,
    ):
        wait_for(lambda: len(list(tmp_path.glob("*.trains"))) == 2, 60, "both train")
        victim, survivor = ((one, two), (two, one))[lost]
        os.killpg(victim.pid, signal.SIGKILL)
        end = finish(survivor, deadline_seconds=10)
    assert end.status == 1
    assert f"node {lost} was lost" in end.err
    assert not any(alive(pid) for pid in pids(tmp_path))


def test_launchers_that_disagree_are_told(hosts: tuple[str, str], secret: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("open('started', 'w')")
    with (
        launched(hosts[0], 0, secret, "--strategy", "seed=1", script) as one,
        launched(hosts[1], 1, secret, "--strategy", "seed=2", script) as two,
    ):
        ends = [finish(process, deadline_seconds=30) for process in (one, two)]
    assert all(end.status != 0 for end in ends)
    for end in ends:
        assert "seed=1" in end.err
        assert "seed=2" in end.err
    assert not Path("started").exists()


def test_a_launcher_too_many_does_not_harm_the_job(hosts: tuple[str, str], secret: Path, tmp_path: Path) -> None:
    words = (FAULTY, tmp_path, "never")
    with (
        launched(hosts[0], 0, secret, *words, workers=1) as one,
        launched(hosts[1], 1, secret, *words, workers=1) as two,
    ):
        wait_for(lambda: len(list(tmp_path.glob("*.trains"))) == 2, 60, "both train")
        with launched(hosts[1], 1, secret, *words, workers=1) as third:
            end = finish(third, deadline_seconds=20)
        assert end.status == 2
        assert "--node-rank 1 is already taken" in end.err
        time.sleep(1)
        assert one.poll() is None
        assert two.poll() is None
        os.kill(one.pid, signal.SIGTERM)
        assert [finish(process, deadline_seconds=10).status for process in (one, two)] == [143, 143]


def test_a_different_number_of_nodes_is_told(hosts: tuple[str, str], secret: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("open('started', 'w')")
    with (
        launched(hosts[0], 0, secret, script, workers=1) as one,
        launched(hosts[1], 1, secret, script, workers=1, nodes=3) as two,
    ):
        ends = [finish(process, deadline_seconds=20) for process in (one, two)]
    for end in ends:
        assert end.status == 2
        assert "nodes 2" in end.err
        assert "3; start all with the same" in end.err
    assert not Path("started").exists()


def test_a_node_that_does_not_come_is_named(hosts: tuple[str, str], secret: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("pass")
    with launched(hosts[0], 0, secret, "--strategy", "timeout_seconds=2", script) as one:
        end = finish(one, deadline_seconds=20)
    assert end.status == 2
    assert "node 1 did not come within 2 s" in end.err
    assert COORDINATOR in end.err


def test_a_node_with_another_secret_is_refused(hosts: tuple[str, str], secret: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.secret"
    succeed([*FORKED, "secret", other])
    script = tmp_path / "script.py"
    script.write_text("pass")
    with (
        launched(hosts[0], 0, secret, script),
        launched(hosts[1], 1, other, script) as stranger,
    ):
        end = finish(stranger, deadline_seconds=30)
    assert end.status == 2
    assert "secret" in end.err
    assert "Traceback" not in end.err
