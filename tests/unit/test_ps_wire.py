"""The parameter server's wire: every request, over sockets and shared memory, in all encodings."""

from __future__ import annotations

import os
import socket
import struct

import numpy as np
import pytest
from ps_harness import DEADLINE_SECONDS, ask, at, config, job

from argosy import _native

WAYS = [("fp32", False), ("fp16", False), ("int8", False), ("fp32", True), ("int8", True)]
ERROR = {"fp32": 0.0, "fp16": 2.0**-11, "int8": 1 / 254}  # of a number, relative to the largest in its row


def rows_of(ids: np.ndarray, dim: int) -> np.ndarray:
    """Some numbers for each id, among them negative ones."""
    return (np.sin(ids[:, None] * 0.37 + np.arange(dim)) * (1 + np.abs(ids[:, None]) % 7)).astype(np.float32)


@pytest.mark.parametrize(("values", "shared"), WAYS)
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("dim", [1, 5, 16])
def test_rows_come_back_as_pushed(servers: int, values: str, shared: bool, dim: int) -> None:
    tolerance = 0.0 if shared else ERROR[values]
    generator = np.random.default_rng(dim)
    ids = generator.integers(-(2**63), 2**63 - 1, 300)
    asked = generator.choice(ids, 2000)
    gradients = rows_of(ids, dim)
    with job(servers) as made:
        client = made.join(0, values, shared)
        assert client.native.shared == [shared] * servers
        client.create_table(7, dim, start=0.25)
        np.testing.assert_array_equal(client.pull(7, asked), np.float32(0.25))
        client.push(7, ids, gradients)
        client.done(0)
        got = client.pull(7, asked, own=1)
        expected = {id: 0.25 - row for id, row in zip(ids.tolist(), gradients, strict=True)}
        wanted = np.stack([expected[id] for id in asked.tolist()])
        largest = np.abs(gradients).max() + np.abs(wanted).max()
        np.testing.assert_allclose(got, wanted, rtol=0, atol=2 * tolerance * largest)
        np.testing.assert_array_equal(client.pull(7, ids, distinct=True), client.pull(7, ids))
        assert sum(client.native.stats(server)["tables"][0]["rows"] for server in range(servers)) == 300


@pytest.mark.parametrize(("values", "shared"), WAYS)
def test_ranges_come_back_as_pushed(values: str, shared: bool) -> None:
    tolerance = 0.0 if shared else ERROR[values]
    begin = rows_of(np.arange(1000), 1)[:, 0]
    with job(servers=2) as made:
        client = made.join(0, values, shared)
        client.create_range(4, 1000, server=1, lr=0.5)
        client.set_range(4, begin)
        np.testing.assert_allclose(client.pull_range(4), begin, rtol=0, atol=tolerance * 7)
        client.push_range(4, begin)
        client.done(0)
        np.testing.assert_allclose(client.pull_range(4, own=1), begin / 2, rtol=0, atol=3 * tolerance * 7)
        assert [len(client.native.stats(server)["ranges"]) for server in (0, 1)] == [0, 1]


@pytest.mark.parametrize("servers", [1, 2])
def test_gradients_of_the_same_id_are_added_up(servers: int) -> None:
    given = np.array([5, 9, 5, 5, -3], dtype=np.int64)
    distinct, places = np.array([5, 9, -3], dtype=np.int64), np.array([0, 1, 0, 0, 2], dtype=np.uint32)
    gradients = np.arange(10, dtype=np.float32).reshape(5, 2)
    with job(servers) as made:
        client = made.join(0)
        client.create_table(0, 2)
        client.native.push(0, at(distinct), 3, at(gradients), places_at=at(places), given=5)
        client.done(0)
        np.testing.assert_array_equal(client.pull(0, given[[0, 1, 4]], own=1), -np.array([[10, 13], [2, 3], [8, 9.0]]))


@pytest.mark.parametrize("servers", [1, 2])
def test_places_may_come_in_any_order_and_some_not_at_all(servers: int) -> None:
    distinct, places = np.arange(5, dtype=np.int64), np.array([3, 1, 3], dtype=np.uint32)
    gradients = np.array([[1.0], [2], [4]], dtype=np.float32)
    with job(servers) as made:
        client = made.join(0)
        client.create_table(0, 1)
        client.push(0, distinct, 100.0)  # so that memory which is used again is no row of zeros
        client.flush()
        client.native.push(0, at(distinct), 5, at(gradients), sequence=9, places_at=at(places), given=3)
        client.flush()
        np.testing.assert_array_equal(client.pull(0, distinct)[:, 0], [-100, -102, -100, -105, -100])
        places[0] = 5
        with pytest.raises(ValueError, match="place 5 is not one of 5 ids"):
            client.native.push(0, at(distinct), 5, at(gradients), sequence=10, places_at=at(places), given=3)


def test_rows_are_set_counted_scanned_and_removed() -> None:
    ids = np.arange(100, dtype=np.int64) - 50
    with job(servers=2) as made:
        client = made.join(0)
        client.create_table(0, 3)
        values = rows_of(ids, 3)
        client.native.set_rows(0, at(ids), 100, at(values))
        np.testing.assert_array_equal(client.pull(0, ids), values)
        shows, clicks = np.arange(100, dtype=np.uint32) + 1, np.ones(100, dtype=np.float32)
        client.push(0, ids, 0.0, shows_at=at(shows), clicks_at=at(clicks))
        client.native.end_day(0, 0.5)
        found: dict[int, tuple[bytes, bytes]] = {}
        for server in (0, 1):
            cursor, first = 0, True
            while cursor or first:
                first = False
                cursor, keys, rows, state, counters = client.native.scan(0, server, cursor, 7)
                assert (len(keys) <= 7 * 8, len(state)) == (True, 0)
                for i, id in enumerate(np.frombuffer(keys, dtype=np.int64).tolist()):
                    found[id] = (rows[i * 12 : i * 12 + 12], counters[i * 8 : i * 8 + 8])
        assert found == {
            int(id): (values[i].tobytes(), np.array([(i + 1) / 2, 0.5], dtype=np.float32).tobytes())
            for i, id in enumerate(ids)
        }
        assert client.native.shrink(0, 10.5, 0, 1.0) == 19  # (i + 1) / 2 + 0.5 < 10.5
        assert sum(client.native.stats(server)["tables"][0]["rows"] for server in (0, 1)) == 81


def test_delay_compensation_sees_what_was_pulled() -> None:
    pulled = np.full((1, 4), 3.0, dtype=np.float32)
    for values, shared in WAYS:
        with job() as made:
            client = made.join(0, values, shared)
            client.create_table(0, start=1.0)
            client.create_range(0, 4)
            client.push(0, [1], 2.0, pulled_at=at(pulled), compensation=0.05)
            client.push(0, [2], 2.0, pulled_at=at(pulled), compensation=5.0)
            client.push_range(0, 2.0, pulled_at=at(pulled), compensation=0.05)
            client.done(0)
            # g + compensation * g * g * (now - pulled) = 2 + 0.05 * 4 * (1 - 3) = 1.6, and 2 + 0.05 * 4 * (0 - 3) = 1.4
            np.testing.assert_allclose(client.pull(0, [1], own=1), -0.6, rtol=0.02)
            np.testing.assert_allclose(client.pull_range(0, own=1), -1.4, rtol=0.02)
            np.testing.assert_allclose(client.pull(0, [2], own=1), 1.0)  # the gradient is taken back, not turned round


def test_learning_rates_are_scaled_by_the_push() -> None:
    with job() as made:
        client = made.join(0)
        client.create_table(0, lr=0.5)
        client.create_range(0, 3, lr=0.5)
        client.push(0, [1], 1.0, lr_factor=0.5)
        client.push_range(0, 1.0, lr_factor=0.25)
        client.done(0)
        np.testing.assert_array_equal(client.pull(0, [1], own=1), -0.25)
        np.testing.assert_array_equal(client.pull_range(0, own=1), -0.125)


def test_pulls_may_be_under_way_together() -> None:
    with job(servers=2) as made:
        client = made.join(0, shared=True)
        client.create_table(0, 2)
        all_ids = [np.arange(begin, begin + 50, dtype=np.int64) for begin in range(10)]
        client.push(0, np.arange(60), -np.arange(60)[:, None])
        client.flush()
        tickets = [client.native.start_pull(0, at(ids.copy()), len(ids)) for ids in all_ids]
        out = np.empty((50, 2), dtype=np.float32)
        for ticket, ids in reversed(list(zip(tickets, all_ids, strict=True))):
            client.native.finish_pull(ticket, at(out), DEADLINE_SECONDS)
            np.testing.assert_array_equal(out, np.stack([ids, ids], axis=1))
        with pytest.raises(ValueError, match="there is no pull"):
            client.native.finish_pull(tickets[0], at(out), DEADLINE_SECONDS)


def test_a_repeated_push_is_applied_once() -> None:
    with job() as made:
        wire = made.wire()
        assert ask(wire, "create_table", config(1), number=3).wrong == "none"
        push = struct.pack("<qf4x", 11, 1.0)
        for sequence in (5, 5, 4, 6, 6):
            assert ask(wire, "push_rows", push, number=3, count=1, dim=1, sequence=sequence).wrong == "none"
        pulled = ask(wire, "pull_rows", struct.pack("<q", 11), number=3, count=1, dim=1)
        assert (pulled.wrong, pulled.count, struct.unpack("<f", pulled.payload)) == ("none", 1, (-2.0,))
        assert made.servers[0].stats()["repeated"] == 3
        # The same sequence for another table is another push.
        assert ask(wire, "create_table", config(1), number=4).wrong == "none"
        assert ask(wire, "push_rows", push, number=4, count=1, dim=1, sequence=5).wrong == "none"
        assert made.servers[0].stats()["tables"][1]["updates"] == 1


def test_configurations_must_agree() -> None:
    with job(workers=2) as made:
        one, other = made.join(0), made.join(1)
        one.create_table(0, 4, lr=0.5)
        other.create_table(0, 4, lr=0.5)
        with pytest.raises(_native.PsError, match=r"server 0 \(host0:7000\).*table 0 exists with another") as caught:
            other.create_table(0, 4, lr=0.25)
        assert (caught.value.kind, caught.value.server) == ("mismatch", 0)
        one.create_range(0, 10)
        with pytest.raises(_native.PsError, match="range 0 exists with another"):
            other.create_range(0, 11)


def test_numbers_that_are_not_finite_are_rejected() -> None:
    for values, shared in WAYS:
        with job() as made:
            client = made.join(0, values, shared)
            client.create_table(2)
            client.create_range(2, 600)
            gradients = np.ones((3, 4), dtype=np.float32)
            gradients[1, 2] = np.nan
            client.push(2, [10, 20, 30], gradients)
            with pytest.raises(
                _native.PsError, match=r"table 2 by client 0.*gradient of id 20 is not finite"
            ) as caught:
                client.flush()
            assert caught.value.kind == "not_finite"
            np.testing.assert_array_equal(client.pull(2, [10, 20, 30]), 0)  # nothing of it was applied
            numbers = np.ones(600, dtype=np.float32)
            numbers[300] = np.inf
            client.push_range(2, numbers)
            with pytest.raises(_native.PsError, match="range 2 by client 0"):
                client.flush()
            client.push(2, [10], 1.0)  # the server goes on
            client.flush()
            np.testing.assert_allclose(client.pull(2, [10]), -1, rtol=0.01)


def test_numbers_that_are_not_finite_are_counted() -> None:
    with job(reject_not_finite=False) as made:
        client = made.join(0)
        client.create_table(2)
        client.create_range(2, 3)
        gradients = np.ones((3, 4), dtype=np.float32)
        gradients[1, 2] = np.nan
        client.push(2, [10, 20, 30], gradients)
        client.push_range(2, [1.0, np.nan, 1.0])
        client.flush()
        np.testing.assert_array_equal(client.pull(2, [10, 20, 30])[:, 0], [-1, 0, -1])
        np.testing.assert_array_equal(client.pull_range(2), 0)
        stats = client.native.stats()
        assert (stats["not_finite"], stats["tables"][0]["not_finite"], stats["ranges"][0]["not_finite"]) == (2, 1, 1)


def test_a_pull_that_took_too_long_leaves_the_connection_in_order() -> None:
    for shared in (False, True):
        with job() as made:
            client = made.join(0, shared=shared)
            client.create_table(0)
            client.push(0, [1], 1.0)
            with pytest.raises(_native.PsError, match="no answer") as caught:
                client.pull(0, [1], own=1, timeout=0.1)
            assert caught.value.kind == "timeout"
            client.done(0)
            np.testing.assert_array_equal(client.pull(0, [2], own=1), 0)
            np.testing.assert_array_equal(client.pull(0, [1], own=1), -1)


def test_nothing_is_left_behind() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task"))

    with job(servers=2) as made:  # what is made once
        made.join(0, shared=True)
    before = count()
    for _ in range(5):
        with job(servers=2) as made:
            client = made.join(0, shared=True)
            client.create_table(0)
            client.push(0, [1], 1.0)
    assert count() == before


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="only 2 workers"):
        _native.PsServer(2, 3)
    with job() as made:
        here, there = socket.socketpair()
        with here, there, pytest.raises(ValueError, match="client 1 is not one of the 1 workers"):
            made.servers[0].add_connection(there.fileno(), 1, 0)
        client = made.join(0)
        client.dims[5] = 4
        with pytest.raises(ValueError, match="table 5 was not created here"):
            client.pull(5, [1])
        with pytest.raises(ValueError, match="has 96 bytes, not 3"):
            client.native.create_table(0, b"abc")
        with pytest.raises(ValueError, match="choose fp32, fp16 or int8"):
            _native.PsClient(0, 1, [0], [0], "fp8", [False])
