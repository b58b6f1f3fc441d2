"""The verifier rejects every schedule that has been tampered with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from argosy.comm.algorithms.catalogue import ALGORITHMS, suits
from argosy.comm.schedule import COPY, REDUCE, SEND, Collective, Schedule, Step, transfers
from argosy.comm.topology import Topology
from argosy.comm.verify import ScheduleError, check_result, execute, initial, verify

Programs = list[list[Step]]
EVERY = [(collective, name) for collective, named in ALGORITHMS.items() for name in named]
IDS = [f"{collective.value}-{name}" for collective, name in EVERY]


def accepts(programs: Programs, schedule: Schedule) -> bool:
    try:
        check_result(execute(programs, initial(schedule)), schedule)
    except ScheduleError:
        return False
    return True


def schedules(collective: Collective, name: str) -> Iterator[Schedule]:
    for ranks, per_host in [(2, 1), (3, 1), (4, 2), (7, 1), (8, 4), (9, 3)]:
        if suits(name, collective, ranks):
            yield ALGORITHMS[collective][name](Topology.uniform(ranks, per_host))


def changed(programs: Programs, rank: int, steps: list[Step]) -> Programs:
    return [steps if other == rank else program for other, program in enumerate(programs)]


def each_step(programs: Programs) -> Iterator[tuple[int, int, Step]]:
    for rank, program in enumerate(programs):
        for position, step in enumerate(program):
            yield rank, position, step


@pytest.mark.parametrize(("collective", "name"), EVERY, ids=IDS)
def test_a_dropped_step_is_found(collective: Collective, name: str) -> None:
    for schedule in schedules(collective, name):
        programs = schedule.programs()
        assert accepts(programs, schedule)
        for rank, position, _ in each_step(programs):
            left = programs[rank][:position] + programs[rank][position + 1 :]
            assert not accepts(changed(programs, rank, left), schedule)


@pytest.mark.parametrize(("collective", "name"), [pair for pair in EVERY if pair[1] != "tree"])
def test_a_swapped_chunk_is_found(collective: Collective, name: str) -> None:
    for schedule in schedules(collective, name):
        programs = schedule.programs()
        for rank, position, step in each_step(programs):
            moved = (step.begin + step.width) % schedule.slots
            if moved == step.begin or moved + step.width > schedule.slots:
                continue
            steps = list(programs[rank])
            steps[position] = step._replace(begin=moved)
            assert not accepts(changed(programs, rank, steps), schedule)


@pytest.mark.parametrize(("collective", "name"), EVERY, ids=IDS)
def test_sending_before_what_is_sent_has_arrived_is_found(collective: Collective, name: str) -> None:
    tried = 0
    for schedule in schedules(collective, name):
        programs = schedule.programs()
        for rank, position, step in each_step(programs):
            if position == 0 or step.kind != SEND:
                continue
            before = programs[rank][position - 1]
            overlaps = before.begin < step.begin + step.width and step.begin < before.begin + before.width
            if before.kind == SEND or not overlaps:
                continue
            steps = list(programs[rank])
            steps[position - 1], steps[position] = step, before
            assert not accepts(changed(programs, rank, steps), schedule)
            tried += 1
    assert tried or name == "pairwise"  # there every message is sent as it was


def test_waiting_in_a_circle_is_found_and_told() -> None:
    swap = Schedule("swap", Collective.ALL_REDUCE, 3, 1, [transfers([0, 1, 2], [1, 2, 0], [0, 0, 0])])
    backwards = [program[::-1] for program in swap.programs()]
    with pytest.raises(ScheduleError, match=r"3 ranks wait for ever: rank 0 .* rank 2 .* rank 1 .* in a circle"):
        execute(backwards, initial(swap))


def test_a_contribution_that_counts_twice_is_found() -> None:
    twice = [transfers([0], [1], [0]), transfers([0], [1], [0])]
    with pytest.raises(ScheduleError, match="rank 1 counts rank 0 twice in slot 0"):
        verify(Schedule("twice", Collective.REDUCE, 2, 1, twice, root=1))


def test_a_message_that_nobody_reads_is_found() -> None:
    schedule = Schedule("lost", Collective.REDUCE, 2, 1, [transfers([0], [1], [0])], root=1)
    programs = schedule.programs()
    programs[0].append(Step(SEND, 1, 0, 1))
    with pytest.raises(ScheduleError, match="rank 1 never reads 1 messages of rank 0"):
        execute(programs, initial(schedule))


def test_sizes_that_do_not_match_are_found() -> None:
    schedule = Schedule("sizes", Collective.BROADCAST, 2, 2, [])
    programs = [[Step(SEND, 1, 0, 2)], [Step(COPY, 0, 0, 1)]]
    with pytest.raises(ScheduleError, match="rank 1 expects 1 slots from rank 0 and gets 2"):
        execute(programs, initial(schedule))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (transfers([0, 1], [1, 0], [0, 1], into=[1, 0]), "writes a slot that the same rank sends"),
        (transfers([0, 1], [2, 2], [0, 0]), "writes a slot twice"),
        (transfers([0], [1], [1], width=2), "slots that do not exist"),
        (transfers([0], [3], [0]), "ranks that do not exist"),
    ],
)
def test_a_round_that_cannot_run_in_place_is_found(part, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(Schedule("place", Collective.ALL_REDUCE, 3, 2, [part]))


@pytest.mark.parametrize("collective", [Collective.ALL_GATHER, Collective.REDUCE_SCATTER])
def test_data_that_no_rank_answers_for_is_found(collective: Collective) -> None:
    with pytest.raises(ScheduleError, match="a slot of data for each rank, not 5"):
        verify(Schedule("odd", collective, 2, 5, []))


def test_reducing_into_an_empty_slot_is_found() -> None:
    schedule = Schedule("empty", Collective.BROADCAST, 2, 1, [])
    with pytest.raises(ScheduleError, match=r"rank 1 reduces .* which holds None"):
        execute([[Step(SEND, 1, 0, 1)], [Step(REDUCE, 0, 0, 1)]], initial(schedule))
