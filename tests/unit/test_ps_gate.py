"""Clocks and gates of the parameter server: what each consistency promises."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
from ps_harness import DEADLINE_SECONDS, Client, at, eventually, job

from argosy import _native


def in_threads(*calls: object) -> None:
    """Run all at once; raise what the first raised."""
    errors: list[BaseException] = []

    def work(call: object) -> None:
        try:
            call()  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE_SECONDS)
        assert not thread.is_alive(), "a worker hangs"
    if errors:
        raise errors[0]


def test_a_worker_reads_its_own_writes() -> None:
    with job(servers=2, workers=1) as made:
        client = made.join(0)
        client.create_table(0, 1)
        ids = np.arange(64)
        for step in range(200):
            np.testing.assert_array_equal(client.pull(0, ids, own=step), -step)
            client.push(0, ids, 1.0)
            client.done(step)
        client.flush()
        assert client.native.global_step == 200


def test_a_pull_waits_for_its_own_clock() -> None:
    with job() as made:
        client = made.join(0)
        client.create_table(0, 1)
        ids, out = np.array([1], dtype=np.int64), np.empty((1, 1), dtype=np.float32)
        ticket = client.native.start_pull(0, at(ids), 1, 1, 0)
        time.sleep(0.05)
        client.push(0, [1], 1.0)  # while a pull waits
        client.done(0)
        client.native.finish_pull(ticket, at(out), DEADLINE_SECONDS)
        assert out[0, 0] == -1


@pytest.mark.parametrize("slack", [0, 1, 3])
def test_nobody_runs_more_than_the_bound_ahead(slack: int) -> None:
    workers, steps = 3, 60
    clocks = [0] * workers
    with job(workers=workers) as made:
        clients = [made.join(worker) for worker in range(workers)]
        for client in clients:
            client.create_table(0, 1)
        ahead: list[int] = []

        def work(worker: int) -> None:
            client, generator = clients[worker], np.random.default_rng(worker)
            for step in range(steps):
                client.pull(0, [worker], own=step, all=max(step - slack, 0))
                ahead.append(step - min(clocks))  # what others have told is no more than what they have done
                if generator.random() < 0.2:
                    time.sleep(0.002)
                client.push(0, [worker], 1.0)
                clocks[worker] = step + 1
                client.done(step)
            client.native.leave(DEADLINE_SECONDS)

        in_threads(*(lambda worker=worker: work(worker) for worker in range(workers)))
        assert max(ahead) <= slack
        np.testing.assert_array_equal([clients[0].pull(0, [w])[0, 0] for w in range(workers)], -steps)


def test_a_lost_client_frees_those_who_wait() -> None:
    with job(workers=3) as made:
        clients = [made.join(worker) for worker in range(3)]
        for client in clients:
            client.create_table(0, 1)
        ids, out = np.array([1], dtype=np.int64), np.empty((1, 1), dtype=np.float32)
        ticket = clients[0].native.start_pull(0, at(ids), 1, 0, 5)
        clients[1].native.leave(DEADLINE_SECONDS)
        clients[2].done(4)
        clients[0].done(3)
        time.sleep(0.05)
        clients[0].done(4)
        clients[2].native.close()  # without a word, at clock 5: it did its part
        clients[0].native.finish_pull(ticket, at(out), DEADLINE_SECONDS)
        eventually(lambda: made.servers[0].lost() == [2])
        clients[0].pull(0, [1], all=5)
        assert made.servers[0].stats()["clocks"] == [5, 0, 5]


def test_a_client_that_dies_in_the_middle_frees_those_who_wait() -> None:
    with job(workers=2) as made:
        clients = [made.join(worker) for worker in range(2)]
        for client in clients:
            client.create_table(0, 1)
        clients[0].done(9)
        threading.Timer(0.1, clients[1].native.close).start()
        begin = time.monotonic()
        clients[0].pull(0, [1], all=10)
        assert 0.05 < time.monotonic() - begin < 5


def gathered(orders: list[list[int]], gradients: np.ndarray, weights: list[float], shared: bool = False) -> np.ndarray:
    """The rows after steps to which workers came in the given orders."""
    workers = gradients.shape[1]
    ids = np.arange(gradients.shape[2])
    with job(workers=workers, aggregate=workers) as made:
        clients = [made.join(worker, shared=shared) for worker in range(workers)]
        for client in clients:
            client.create_table(0, gradients.shape[3], lr=0.1)
        for step, order in enumerate(orders):
            for worker in order:
                # Workers do not push the same ids, nor in the same order.
                part = np.roll(ids[worker:], worker + step)
                clients[worker].push(0, part, gradients[step, worker][part])
                clients[worker].done(step, weights[worker])
                clients[worker].flush()
        return clients[0].pull(0, ids, all=len(orders))


def test_a_gathered_step_is_the_weighted_mean_whoever_came_first() -> None:
    generator = np.random.default_rng(3)
    steps, workers, rows, dim = 6, 3, 50, 5
    gradients = generator.normal(size=(steps, workers, rows, dim)).astype(np.float32)
    weights = [1.0, 7.0, 3.0]
    orders = list(itertools.permutations(range(workers)))
    first = gathered([list(orders[0])] * steps, gradients, weights)
    for shared in (False, True):
        assert gathered([list(order) for order in orders], gradients, weights, shared).tobytes() == first.tobytes()
    expected = np.zeros((rows, dim))
    for step in range(steps):
        for row in range(rows):
            present = [worker for worker in range(workers) if row >= worker]
            total = sum(weights[worker] * gradients[step, worker, row].astype(np.float64) for worker in present)
            expected[row] -= 0.1 * total / sum(weights)
    np.testing.assert_allclose(first, expected, rtol=0, atol=1e-5)


def test_ranges_are_gathered_too() -> None:
    with job(workers=2, aggregate=2) as made:
        clients = [made.join(worker) for worker in range(2)]
        for client in clients:
            client.create_range(0, 5)
        clients[1].push_range(0, [1.0, 2, 3, 4, 5])
        clients[1].done(0, 1.0)
        clients[0].push_range(0, 9.0)
        clients[0].done(0, 3.0)
        np.testing.assert_allclose(clients[0].pull_range(0, all=1), -(27 + np.arange(1, 6)) / 4)
        clients[0].flush()
        assert clients[0].native.global_step == 1


def test_late_gradients_are_dropped_and_counted() -> None:
    workers, aggregate, steps = 4, 2, 25
    with job(workers=workers, aggregate=aggregate) as made:
        clients = [made.join(worker) for worker in range(workers)]
        for client in clients:
            client.create_table(0, 1)
            client.create_range(0, 1)

        def work(worker: int) -> None:
            client = clients[worker]
            for step in range(steps):
                client.pull(0, [0], all=step)
                client.push(0, [0, worker + 1], 1.0)
                client.push_range(0, 1.0)
                client.done(step)
            client.flush()

        in_threads(*(lambda worker=worker: work(worker) for worker in range(workers)))
        stats = made.servers[0].stats()
        late = (workers - aggregate) * steps
        assert (stats["version"], stats["global_step"]) == (steps, steps)
        assert (stats["late_dropped"], stats["late_pushes"], stats["late_rows"]) == (late, 2 * late, 2 * late)
        # The mean of those in time is 1 at each step; each of them has half of its own row's gradient.
        assert clients[0].pull(0, [0])[0, 0] == -steps
        own = [clients[0].pull(0, [worker + 1])[0, 0] for worker in range(workers)]
        assert sum(own) == -steps * aggregate * 0.5
        assert stats["late_by_client"] == [steps + 2 * value for value in own]


def test_servers_agree_on_who_was_late() -> None:
    workers, aggregate, steps = 3, 2, 40
    with job(servers=2, workers=workers, aggregate=aggregate) as made:
        clients = [made.join(worker) for worker in range(workers)]
        for client in clients:
            for server in range(2):
                client.create_range(server, workers, server)

        def work(worker: int) -> None:
            client = clients[worker]
            for step in range(steps):
                for server in range(2):
                    client.push_range(server, np.eye(workers)[worker])
                client.done(step, may_be_late=True)
                client.pull_range(0, all=step + 1)
            client.flush()

        in_threads(*(lambda worker=worker: work(worker) for worker in range(workers)))
        first, second = (server.stats() for server in made.servers)
        assert first["late_by_client"] == second["late_by_client"]
        assert sum(first["late_by_client"]) == (workers - aggregate) * steps
        # Whoever was in a step is in it on both: each has half of its own gradient there.
        taken = [clients[0].pull_range(server, all=steps) for server in range(2)]
        np.testing.assert_array_equal(taken[0], taken[1])
        np.testing.assert_array_equal(taken[0], (np.array(first["late_by_client"]) - steps) / 2)


def test_schedules_count_batches_of_workers_that_are_there() -> None:
    with job(workers=2) as made:
        clients = [made.join(worker) for worker in range(2)]
        for client in clients:
            client.done(0, batches=5)  # merged ones
            client.flush()
        assert made.servers[0].stats()["global_step"] == 5
        clients[1].native.close()
        eventually(lambda: made.servers[0].lost() == [1])
        for step in range(1, 4):
            clients[0].done(step)
        clients[0].flush()
        assert made.servers[0].stats()["global_step"] == 8


def test_who_leaves_and_joins_again_has_its_clock_and_another_life() -> None:
    with job(workers=1) as made:
        client = made.join(0)
        client.done(0)
        client.native.leave(DEADLINE_SECONDS)
        client.native.close()
        made.join(0)
        told = made.servers[0].stats()
        assert (told["clocks"], told["lives"]) == ([1], [1])


def test_steps_are_over_when_all_servers_have_applied_them() -> None:
    with job(servers=2, workers=2, aggregate=1) as made:
        one, other = made.join(0), made.join(1)
        for client in (one, other):
            client.create_range(0, 1, server=0)
        assert (one.native.global_step, one.native.steps_over) == (0, 0)
        for step in range(3):
            other.done(step)
        other.flush()
        one.pull_range(0)  # asks the first server only
        assert (one.native.global_step, one.native.steps_over) == (3, 0)
        one.done(0)
        one.flush()
        assert (one.native.global_step, one.native.steps_over) == (3, 3)
        assert [server.stats()["late_by_client"] for server in made.servers] == [[1, 0]] * 2


def test_nobody_waits_for_a_client_that_rests() -> None:
    with job(workers=2) as made:
        busy, idle = made.join(0), made.join(1)
        for client in (busy, idle):
            client.create_table(0, 1)
        busy.done(4)
        idle.native.rest(DEADLINE_SECONDS)
        busy.pull(0, [1], all=5)
        idle.pull(0, [1])  # it goes on, and is waited for
        with pytest.raises(_native.PsError, match="no answer"):
            busy.pull(0, [1], all=5, timeout=0.2)


def test_too_few_left_is_told_with_who_was_lost() -> None:
    with job(workers=3, aggregate=2) as made:
        clients = [made.join(worker) for worker in range(3)]
        for client in clients:
            client.create_table(0, 1)
        clients[1].native.close()
        eventually(lambda: made.servers[0].lost() == [1])
        for worker in (0, 2):  # two are enough
            clients[worker].push(0, [1], 1.0)
            clients[worker].done(0)
        assert clients[0].pull(0, [1], all=1)[0, 0] == -1
        (leaving := threading.Timer(0.05, lambda: clients[2].native.leave(DEADLINE_SECONDS))).start()
        clients[0].push(0, [1], 1.0)
        clients[0].done(1)
        with pytest.raises(_native.PsError, match=r"step 1 cannot end.*client 1 is lost, client 2 has left") as caught:
            clients[0].pull(0, [1], all=2)
        leaving.join()  # or it would meet the end of the client that it leaves with
        assert caught.value.kind == "too_few"
        assert clients[0].pull(0, [1], all=1)[0, 0] == -1  # what was applied is still to be had


def test_a_step_ends_without_those_who_did_it_and_went() -> None:
    with job(workers=2, aggregate=2) as made:
        clients = [made.join(worker) for worker in range(2)]
        for client in clients:
            client.create_table(0, 1)
        clients[1].push(0, [1], 3.0)
        clients[1].done(0)
        clients[1].flush()
        clients[1].native.close()
        eventually(lambda: made.servers[0].lost() == [1])
        clients[0].push(0, [1], 1.0)
        clients[0].done(0)
        assert clients[0].pull(0, [1], all=1)[0, 0] == -2


def test_pushes_of_a_lost_client_that_did_not_end_its_step_are_forgotten() -> None:
    with job(workers=2, aggregate=1) as made:
        clients = [made.join(worker) for worker in range(2)]
        for client in clients:
            client.create_table(0, 1)
        clients[1].push(0, [1], 100.0)
        clients[1].flush()
        clients[1].native.close()
        eventually(lambda: made.servers[0].lost() == [1])
        back = made.join(1)
        back.create_table(0, 1)
        back.sequence = 1
        back.push(0, [1], 1.0)
        back.done(0)
        assert back.pull(0, [1], all=1)[0, 0] == -1
        assert made.servers[0].lost() == []


def test_delay_compensation_needs_pushes_at_once() -> None:
    with job(workers=1, aggregate=1) as made:
        client = made.join(0)
        client.create_table(0, 1)
        pulled = np.zeros((1, 1), dtype=np.float32)
        client.push(0, [1], 1.0, pulled_at=at(pulled), compensation=0.5)
        with pytest.raises(_native.PsError, match="applied at once"):
            client.flush()


def test_numbers_that_are_not_finite_are_left_out_of_a_gathered_step() -> None:
    with job(workers=2, aggregate=2, reject_not_finite=False) as made:
        clients = [made.join(worker) for worker in range(2)]
        for client in clients:
            client.create_table(0, 2)
        clients[0].push(0, [1, 2], [[np.nan, 1], [np.inf, 1]])
        clients[1].push(0, [1], 4.0)
        for client in clients:
            client.done(0)
        np.testing.assert_array_equal(clients[0].pull(0, [1, 2], all=1), [[-2, -2], [0, 0]])
        stats = made.servers[0].stats()
        assert (stats["tables"][0]["not_finite"], stats["tables"][0]["rows"]) == (2, 1)


def test_staleness_is_what_others_did_between_pull_and_push() -> None:
    with job(workers=2) as made:
        slow, fast = (made.join(worker) for worker in range(2))
        for client in (slow, fast):
            client.create_table(0, 1)

        def step(client: Client, number: int) -> None:
            client.pull(0, [1], own=number)
            client.push(0, [1], 1.0)
            client.done(number)
            client.flush()

        slow.pull(0, [1])
        for number in range(3):
            step(fast, number)
        ids = np.array([1], dtype=np.int64)
        ahead = slow.native.start_pull(0, at(ids), 1)  # the next batch's: not what this gradient was made of
        slow.push(0, [1], 1.0)
        slow.done(0)
        slow.flush()
        assert made.servers[0].stats()["staleness"][:5] == [3, 0, 0, 1, 0]
        slow.native.finish_pull(ahead, at(np.empty(1, dtype=np.float32)), DEADLINE_SECONDS)
        slow.push(0, [1], 1.0)
        slow.flush()
        assert made.servers[0].stats()["staleness"][:5] == [4, 0, 0, 1, 0]
        assert made.servers[0].stats()["stalest"] == 3


def test_the_global_step_is_that_of_all() -> None:
    with job(workers=2) as made:
        clients = [made.join(worker) for worker in range(2)]
        clients[0].done(0)
        clients[0].done(1)
        clients[1].done(0)
        for client in clients:
            client.create_table(0)
        assert [client.native.global_step for client in clients] == [1, 1]
        clients[1].done(1)
        clients[1].flush()
        clients[0].pull(0, [1])
        assert [client.native.global_step for client in clients] == [2, 2]
