"""The cost model: how long a schedule takes on a topology, from latency, bandwidth and speed of reduction.

A transfer leaves when its source has the data and its link is free; it takes the link's latency plus its bytes over the
bandwidth that it gets, and its target has the data when it has arrived and been reduced. Transfers of one round that
share a link (a host's network link, or a rank's own turn inside a host) share its bandwidth. All transfers of a round
are computed at once, so that thousands of ranks take seconds.

[Note: pipelined]
The engine cuts messages into chunks and sends a chunk on as soon as it is there, while the rest is under way. So a
transfer may begin when the first byte it needs has arrived, and ends no earlier than a chunk after the last one. A rank
remembers the last message that it received, and from when to when its bytes came; what a transfer sends of that message
follows from its slots.

With `pipelined=False` messages are passed on whole, as in the textbook's formulas.

[Note: beside]
A rank may send a round's message while the target still receives one of an earlier round from somebody else. Then both
share the target's link, and the earlier one comes later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from argosy.comm.schedule import Bools, Ints, Round, Schedule
from argosy.comm.topology import Topology

Floats = npt.NDArray[np.float64]

# As the engine cuts messages: into sixteen, if the chunks are neither too short nor too long.
_CHUNKS, _SHORT_CHUNK, _LONG_CHUNK = 16, 64 << 10, 256 << 10
# Between hosts chunks go side by side, one on each socket: the first is there when all of these are.
_SOCKETS = 2


def simulate(schedule: Schedule, topology: Topology, size_bytes: float, *, pipelined: bool = True) -> float:
    """Seconds until the last rank is done, for `size_bytes` of data on every rank (for all-gather: of the result)."""
    return float(simulate_sizes(schedule, topology, [size_bytes], pipelined=pipelined)[0])


def simulate_sizes(
    schedule: Schedule, topology: Topology, sizes_bytes: Sequence[float], *, pipelined: bool = True
) -> Floats:
    """The same for several sizes at once."""
    if schedule.ranks != topology.ranks:
        raise ValueError(f"the schedule has {schedule.ranks} ranks and the topology {topology.ranks}")
    order = np.argsort(np.asarray(sizes_bytes, dtype=np.float64), kind="stable")
    slot_bytes = np.asarray(sizes_bytes, dtype=np.float64)[order] / schedule.data_slots
    hosts = topology.host_array()
    state = State.at_rest(topology.ranks, len(slot_bytes))
    flow: Flow | None = None
    for part in schedule.rounds:
        if flow is None or not flow.suits(part):
            flow = Flow(part, hosts, topology, slot_bytes, pipelined)
        flow.run(part, state)
    times = np.zeros(len(order))
    times[order] = np.maximum(state.sent, state.done).max(axis=0, initial=0.0)
    return times


@dataclass
class State:
    """Clocks of all ranks, a row for each; a column for each size, sizes rising. Changed from round to round.

    The last message of a rank is told by its slots and by when it came: from `first`, `lasting` so long, in chunks that
    are a `piece` of it each.
    """

    sent: Floats  # until when the rank sends
    received: Floats  # until when its link is busy with what comes in
    done: Floats  # when all that it has received is there and reduced
    earlier: Floats  # the same, but for the last message
    first: Floats
    lasting: Floats
    piece: Floats
    into: Ints
    width: Ints
    source: Ints  # who sent it
    known: Bools  # whether the last message was the only one of its round

    @classmethod
    def at_rest(cls, ranks: int, sizes: int) -> State:
        """Nothing has been sent."""
        sent, received, done, earlier, first, lasting, piece = np.zeros((7, ranks, sizes))
        into, width, source = np.zeros((3, ranks), np.int32)
        return cls(sent, received, done, earlier, first, lasting, piece, into, width, source, np.zeros(ranks, np.bool_))

    def needed(self, part: Round, large: slice) -> tuple[Floats, Floats]:
        """When the first chunk that each transfer sends is there, and when the last is, for the `large` sizes."""
        rank = part.source
        into, width, known = self.into[rank], np.maximum(self.width[rank], 1), self.known[rank][:, None]
        begins, lasts, piece = self.first[rank, large], self.lasting[rank, large], self.piece[rank, large]
        begin = ((part.begin - into) / width)[:, None]
        end = ((part.begin + part.width - into) / width)[:, None]
        plain = np.where(known, self.earlier[rank, large], self.done[rank, large])
        overlaps = known & (begin < 1) & (end > 0)
        # What begins with older slots can leave before the message comes.
        first = np.where(overlaps & (begin >= 0), begins + np.minimum(begin + piece, 1.0) * lasts, plain)
        last = np.where(overlaps, begins + np.minimum(end + piece, 1.0) * lasts, plain)
        return first, last

    def remember(self, part: Round, came: Floats, done: Floats, piece: Floats, alone: Bools, large: slice) -> None:
        """Note the messages of a round as the last ones; small ones go whole, and `done` is all that matters."""
        target = part.target
        self.earlier[target, large] = self.done[target, large]
        self.first[target, large] = came[:, large]
        self.lasting[target, large] = done[:, large] - came[:, large]
        self.piece[target, large] = piece[:, large]
        self.into[target], self.width[target], self.known[target] = part.into, part.width, alone
        self.source[target] = part.source


class Flow:
    """What a round costs whatever the time is. Rounds that differ only in which slots they move have the same."""

    def __init__(self, part: Round, hosts: Ints, topology: Topology, slot_bytes: Floats, pipelined: bool) -> None:
        self._part = part
        self._alone = np.bincount(part.target, minlength=topology.ranks)[part.target] == 1
        self._once = [len(np.unique(end)) == part.size for end in (part.source, part.target)]
        everybody = np.arange(topology.ranks)
        # Of all ranks in order there is nothing to pick out.
        self._source = slice(None) if np.array_equal(part.source, everybody) else part.source
        outgoing, incoming, self._latency = _wire(part, hosts, topology)
        self._outgoing, self._incoming = outgoing * slot_bytes, incoming * slot_bytes
        self._seconds = np.maximum(self._outgoing, self._incoming)
        reduced = np.bincount(part.target, part.width * part.reduce, minlength=topology.ranks)
        self._reducing = (reduced[:, None] / topology.reduce_bytes_per_second * slot_bytes)[part.target]
        size = part.width[:, None] * slot_bytes
        chunk = np.clip(size / _CHUNKS, _SHORT_CHUNK, _LONG_CHUNK)
        side_by_side = np.where(hosts[part.source] != hosts[part.target], _SOCKETS, 1)[:, None]
        self._piece = (
            np.minimum(side_by_side * chunk / np.maximum(size, 1e-9), 1.0) if pipelined else np.ones_like(size)
        )
        whole = (self._piece == 1.0).all(axis=0)
        self._large = slice(len(whole) if whole.all() else int(np.argmin(whole)), None)  # sizes cut into chunks

    def suits(self, part: Round) -> bool:
        """Whether a round is like the one this was made for; algorithms share the columns that do not change."""
        mine = self._part
        same = part.source is mine.source and part.target is mine.target
        return same and part.width is mine.width and part.reduce is mine.reduce

    def run(self, part: Round, state: State) -> None:
        """Move the clocks on by a round."""
        source, target, large = self._source, part.target, self._large
        if large.start < state.sent.shape[1]:
            self._delay(part, state)
        begin, end, gone = self._times(part, state)
        end = np.maximum(end, state.received[target] + self._incoming)
        came = begin + self._latency
        done = np.maximum(end + self._latency + self._piece * self._reducing, came + self._reducing)
        state.remember(part, came, done, self._piece, self._alone, large)
        self._latest(state.sent, source, gone, self._once[0])
        self._latest(state.received, target, end, self._once[1])
        self._latest(state.done, target, done, self._once[1])

    def _times(self, part: Round, state: State) -> tuple[Floats, Floats, Floats]:
        """When each transfer begins, when it would end if nothing else came to its target, and when its source's link
        is free for the next: earlier, if the target is who cannot take more.
        """
        source, large = self._source, self._large
        begin = np.maximum(state.sent[source], state.done[source])
        if large.start < begin.shape[1]:
            first, last = state.needed(part, large)
            begin[:, large] = np.maximum(state.sent[source, large], first)
        else:
            last = begin[:, large]
        ends = []
        for seconds in (self._seconds, self._outgoing):
            end = begin + seconds
            end[:, large] = np.maximum(end[:, large], last + self._piece[:, large] * seconds[:, large])
            ends.append(end)
        return begin, ends[0], ends[1]

    def _delay(self, part: Round, state: State) -> None:
        """Let the targets' last messages take longer where this round's come in beside them: see [Note: beside]."""
        target, large = part.target, self._large
        begin = self._times(part, state)[0]
        beside = (self._alone & (state.source[target] != part.source))[:, None]
        left = np.maximum(state.received[target] - begin, 0.0)
        delay = np.where(beside, np.minimum(self._incoming, left), 0.0)[:, large]
        # A target has one such message: the others are not alone.
        for clock in (state.lasting, state.done):
            clock[target, large] += delay

    @staticmethod
    def _latest(clocks: Floats, rank: Ints | slice, least: Floats, once: bool) -> None:
        if once:
            clocks[rank] = np.maximum(clocks[rank], least)
        else:
            assert not isinstance(rank, slice)
            np.maximum.at(clocks, rank, least)


def _wire(part: Round, hosts: Ints, topology: Topology) -> tuple[Floats, Floats, Floats]:
    """For each transfer of a round: seconds for each byte of a slot on its source's link and on its target's, which it
    may share with others, and its latency.
    """
    outgoing, incoming = hosts[part.source], hosts[part.target]
    crosses, moves = outgoing != incoming, part.source != part.target
    # A rank moves its own bytes one after another; a host's link is shared by the transfers of all its ranks.
    by_rank = [np.bincount(end, part.width * ~crosses)[end] for end in (part.source, part.target)]
    by_host = [np.bincount(end, part.width * crosses)[end] for end in (outgoing, incoming)]
    inside, between = topology.inside, topology.between
    out, into = (
        np.where(crosses, host / between.bytes_per_second, rank / inside.bytes_per_second)
        for host, rank in zip(by_host, by_rank, strict=True)
    )
    latency = np.where(crosses, between.latency_seconds, inside.latency_seconds)
    return (out * moves)[:, None], (into * moves)[:, None], (latency * moves)[:, None]


def bytes_sent(schedule: Schedule, topology: Topology, size_bytes: float) -> tuple[float, float]:
    """The most that any rank sends, and the most that any host sends to others."""
    hosts = topology.host_array()
    by_rank, by_host = np.zeros(topology.ranks), np.zeros(int(hosts.max(initial=0)) + 1)
    for part in schedule.rounds:
        size = part.width * (size_bytes / schedule.data_slots)
        np.add.at(by_rank, part.source, size * (part.source != part.target))
        np.add.at(by_host, hosts[part.source], size * (hosts[part.source] != hosts[part.target]))
    return float(by_rank.max(initial=0.0)), float(by_host.max(initial=0.0))
