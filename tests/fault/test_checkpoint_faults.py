"""Saves that are killed, disks that are full, bits that flip: the checkpoint before it loads, and training goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from kept_states import read, write
from launching import ARGOSY, run

from argosy.checkpoint.errors import CheckpointError

SEEDS = 50


def check(folder: Path) -> int:
    """What loads is one of the states that were saved, whole; returns its number."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is passed over: a killed save leaves no damaged checkpoint
        loaded = read(folder)
    number = loaded["count"]["step"]
    for tensor in loaded["model"].values():
        assert torch.equal(tensor, torch.full_like(tensor, number))
    return int(number)


@contextmanager
def savers(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with torch loaded that forks one saver after the other: starting each anew would take seconds."""
    script = Path(__file__).parent / "scripts" / "killed_saves.py"
    path = f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    process = subprocess.Popen(
        [sys.executable, script, folder, str(SEEDS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.timeout(110)
def test_a_save_that_is_killed_leaves_the_one_before(tmp_path: Path) -> None:
    folder = tmp_path / "net"
    in_the_middle = before = 0
    with savers(folder) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for seed in range(SEEDS):
            pid = int(process.stdout.readline())  # it has saved once, and saves again
            time.sleep(random.Random(seed).uniform(0.0, 0.05))
            os.kill(pid, signal.SIGKILL)
            assert process.stdout.readline() == "killed\n"
            in_the_middle += any(path.name.startswith(".aside-") for path in folder.iterdir())
            number = check(folder)
            assert number > before, "what was saved last is there, and the next saver goes on from it"
            before = number
            process.stdin.write("go on\n")
            process.stdin.flush()
        assert process.wait(10) == 0
    assert in_the_middle > SEEDS // 5, "saves were killed in the middle"


@pytest.mark.parametrize("who", ["all", "last"])
def test_a_script_that_fails_while_it_saves_shows_its_own_error_alone(tmp_path: Path, who: str) -> None:
    script = Path(__file__).parent / "scripts" / "failed_save.py"
    finished = run([*ARGOSY, "run", "--workers", "2", script, tmp_path / "net", who])
    assert finished.status == 1
    said = [line for line in finished.err.splitlines() if line.startswith("[")]
    assert "Traceback" in said[0]
    assert said[-1].endswith("ValueError: a mistake of the script's")
    assert "Exception ignored" not in finished.err
    assert "PeerLost" not in finished.err
    assert not list(tmp_path.glob("net/step-*")) or check_whole(tmp_path / "net")


def check_whole(folder: Path) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return bool(read(folder))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "argosy-test", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def state(number: int, elements: int) -> dict[str, dict[str, object]]:
    return {"model": {"w": torch.full((elements,), float(number))}, "count": {"step": number}}


def test_a_full_disk_leaves_the_checkpoint_before_and_no_rest(small_disk: Path) -> None:
    folder = small_disk / "net"
    write(folder, state(1, 300_000), step=1)
    for _ in range(3):
        with pytest.raises(CheckpointError, match=r"rank0\.safetensors could not be written.*No space left"):
            write(folder, state(2, 900_000), step=2)
        assert [path.name for path in folder.iterdir()] == ["step-00000001"]
        assert check(folder) == 1
    write(folder, state(3, 300_000), step=3, keep=1)  # and training goes on
    assert check(folder) == 3
    write(folder, state(4, 300_000), step=4)


@pytest.mark.parametrize("seed", range(10))
def test_a_flipped_bit_or_a_cut_is_found_wherever_it_is(tmp_path: Path, seed: int) -> None:
    folder, chance = tmp_path / "net", random.Random(seed)
    write(folder, state(1, 500), step=1)
    write(folder, state(2, 500), step=2)
    file = folder / "step-00000002" / chance.choice(["rank0.safetensors", "rank0.safetensors", "manifest.json"])
    data = bytearray(file.read_bytes())
    if chance.random() < 0.3:
        del data[chance.randrange(len(data)) :]
    else:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="step-00000002"):
        read(folder / "step-00000002")
    with pytest.warns(UserWarning, match=f"step-00000002/{file.name}"):
        assert read(folder)["count"] == {"step": 1}
    write(folder, state(3, 500), step=3)
    assert check(folder) == 3
