"""Meetings of those who are there: whoever goes, the others get the same from all that are left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from control_harness import Harbour, harbour

from argosy.comm import living
from argosy.control.meetings import Meetings


@pytest.fixture
def at() -> Iterator[Harbour]:
    with harbour() as made:
        yield made


def together(*calls) -> list:
    """The results of calls that run at once."""
    results: list = [None] * len(calls)

    def work(place: int) -> None:
        results[place] = calls[place]()

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a worker hangs"
    return results


def of(at: Harbour, world: int) -> list[Meetings]:
    return [Meetings(at.client(f"rank {rank}"), "meetings", rank, world) for rank in range(world)]


def test_all_get_what_all_gave_again_and_again(at: Harbour) -> None:
    workers = of(at, 3)
    with at.client() as client:
        for number in range(4):
            given = [f"{number} of {rank}".encode() for rank in range(3)]
            told = together(*(lambda w=w, g=g: w.meet(g) for w, g in zip(workers, given, strict=True)))
            assert told == [given] * 3
        assert client.num_keys() == 3  # those of the last meeting


def test_whoever_goes_is_missing_for_all_alike(at: Harbour) -> None:
    one, two, three = of(at, 3)
    assert together(lambda: one.meet(b"1"), lambda: two.meet(b"2"), lambda: three.meet(b"")) == [[b"1", b"2", b""]] * 3

    def go() -> None:
        time.sleep(0.1)
        two.close()

    assert together(lambda: one.meet(b"1"), lambda: three.meet(b"3"), go)[:2] == [[b"1", b"3"]] * 2
    assert one.here == three.here == (0, 2)
    assert together(lambda: one.meet(b"1"), lambda: three.meet(b"3")) == [[b"1", b"3"]] * 2
    three.close()
    assert one.meet(b"1") == [b"1"]


def test_what_one_gave_before_it_went_counts(at: Harbour) -> None:
    one, two = of(at, 2)
    going = threading.Thread(target=two.meet, args=(b"2",), daemon=True)
    going.start()
    time.sleep(0.2)
    two.close()
    assert one.meet(b"1") == [b"1", b"2"]
    assert one.meet(b"1") == [b"1"]
    going.join(20)


def test_sums_in_parts(at: Harbour, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(living, "_MEETING_BYTES", 8 * 2 * 3)  # three numbers of each of two
    workers = of(at, 2)
    tensors = [torch.arange(8, dtype=torch.float64) * (1 + rank) for rank in range(2)]
    together(*(lambda r=r: living.add_up(tensors[r], workers[r], 2) for r in range(2)))
    for tensor in tensors:
        torch.testing.assert_close(tensor, 3.0 * torch.arange(8, dtype=torch.float64), rtol=0, atol=0)


def test_who_is_lost_between_two_parts_counts_in_none(at: Harbour, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(living, "_MEETING_BYTES", 8 * 3 * 2)  # two numbers of each of three
    workers = of(at, 3)
    tensors = [torch.full((6,), 1.0 + rank, dtype=torch.float64) for rank in range(3)]

    def give_a_part_and_go() -> None:
        workers[2].meet(tensors[2][:2].numpy().tobytes())
        workers[2].close()

    together(*(lambda r=r: living.add_up(tensors[r], workers[r], 3) for r in range(2)), give_a_part_and_go)
    assert tensors[0].tolist() == tensors[1].tolist() == [3.0] * 6
