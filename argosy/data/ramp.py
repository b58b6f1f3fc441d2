"""A ramp: the global batch begins with a part of its size, and rises in equal steps to the whole.

Early in training gradients are large and agree: a small batch learns as much from far fewer samples. `ramp=4:3epochs`
begins with a quarter of the batch; over the first 3 epochs it rises to half and to three quarters, a third of that
time each, and is whole from then on.

How large a step is depends on where it begins and on nothing else: the epoch and the samples before it, or the steps
before it. So a run that is resumed in the middle cuts the rest as the first run would have. A step may be several
batches that are accumulated: they are all of one size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from argosy.config import ConfigError, Span, parse_span


class Piece(NamedTuple):
    """A batch: the positions of an epoch from `begin` to `end`; `batch` is its size if the epoch does not end in it."""

    begin: int
    end: int
    batch: int


@dataclass(frozen=True)
class Ramp:
    """From one part of `parts` to the whole batch, over a length of training.

    >>> ramp = Ramp.parse("4:3epochs")
    >>> [ramp.batch(256, epoch=epoch, samples=1000, begin=0, steps_before=0) for epoch in range(5)]
    [64, 128, 192, 256, 256]
    >>> ramp.told(256)
    'batches of 64, 128, 192 for 1 epoch each, then 256 (ramp=4:3epochs)'
    """

    text: str
    parts: int
    span: Span
    accumulate: int = 1  # batches of a step

    @classmethod
    def parse(cls, text: str, accumulate: int = 1) -> Ramp | None:
        """A ramp from its spelling; None if there is to be none."""
        if text == "none":
            return None
        parts, _, length = text.partition(":")
        span = parse_span(length)
        if span is None or not (parts.isascii() and parts.isdigit()) or not 2 <= int(parts) <= 1 << 20:
            fix = (
                "expected parts:length, such as ramp=4:3epochs to begin with a quarter and be whole after 3 epochs; "
                "a length is below 10^15"
            )
            raise ConfigError("ramp", text, fix)
        return cls(text, int(parts), span, accumulate)

    def check(self, full: int, workers: int) -> None:
        """Refuse a ramp that leaves workers without a sample."""
        if self.sizes(full)[0] < workers:
            fix = (
                f"it begins with {self.sizes(full)[0]} of the global batch's {full} samples, too few for {workers} "
                f"worker{'s' if workers > 1 else ''}; use at most {full // workers} parts, or a larger batch"
            )
            raise ConfigError("ramp", self.text, fix)

    def sizes(self, full: int) -> list[int]:
        """The sizes of batches, in turn; the last is the whole."""
        return [full * part // self.parts for part in range(1, self.parts + 1)]

    def batch(self, full: int, *, epoch: int, samples: int, begin: int, steps_before: int) -> int:
        """The size of the batches of the step that begins at a position of an epoch of so many samples.

        `steps_before` are those of the whole run.
        """
        if self.span.unit == "epochs":
            done, length = epoch * samples + begin, self.span.count * samples
        else:
            done, length = steps_before, self.span.count
        stage = min(self.parts - 1, done * (self.parts - 1) // length)
        return full * (stage + 1) // self.parts

    def pieces(self, full: int, samples: int, drop_last: bool, epoch: int, start: int) -> list[Piece] | None:
        """The batches of an epoch after its first `start` samples, which end a step; None if all are whole."""
        steps = self._steps_before(full, samples, drop_last, epoch, start)
        begun_with = (
            self.batch(full, epoch=epoch, samples=samples, begin=start, steps_before=steps) if samples else full
        )
        return None if begun_with == full else self._cut(full, samples, drop_last, epoch, start, steps)

    def told(self, full: int) -> str:
        """What happens to the batch of a step, for the user."""
        *rising, whole = (self.accumulate * size for size in self.sizes(full))
        each = self.span.count / len(rising)
        unit = self.span.unit[:-1] if each == 1 else self.span.unit
        together = " each" if len(rising) > 1 else ""
        sizes = [str(size) for size in rising]
        if len(sizes) > 6:
            sizes[2:-1] = ["..."]
        return f"batches of {', '.join(sizes)} for {each:.4g} {unit}{together}, then {whole} (ramp={self.text})"

    def _cut(self, full: int, samples: int, drop_last: bool, epoch: int, start: int, steps: int) -> list[Piece]:
        pieces: list[Piece] = []
        begin, batch = start, full
        while begin < samples:
            if len(pieces) % self.accumulate == 0:
                before = steps + len(pieces) // self.accumulate
                batch = self.batch(full, epoch=epoch, samples=samples, begin=begin, steps_before=before)
            if drop_last and begin + batch > samples:
                break
            pieces.append(Piece(begin, min(begin + batch, samples), batch))
            begin += batch
        return pieces

    def _steps_before(self, full: int, samples: int, drop_last: bool, epoch: int, start: int) -> int:
        """How many steps the run has taken before a place, or enough to be past the ramp."""
        if self.span.unit == "epochs":
            return 0  # not asked for
        steps = 0
        for earlier in range(epoch):
            taken = self._steps_of(len(self._cut(full, samples, drop_last, earlier, 0, steps)))
            steps += taken
            if steps >= self.span.count or not taken:
                return steps
        begun = self._cut(full, samples, drop_last, epoch, 0, steps) if start else []
        return steps + self._steps_of(sum(piece.begin < start for piece in begun))

    def _steps_of(self, batches: int) -> int:
        return -(-batches // self.accumulate)
