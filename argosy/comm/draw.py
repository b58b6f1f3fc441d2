"""A picture of a schedule: ranks from top to bottom, rounds from left to right, an arrow for each transfer.

An arrow carries the slots that it moves. Reductions are warm, copies cold. SVG, written by hand: no library is needed.
"""

from __future__ import annotations

from argosy.comm.schedule import Schedule

_COLUMN, _ROW, _LEFT, _TOP = 120, 44, 70, 56
_REDUCE, _COPY = "#d95f02", "#1f78b4"


def svg(schedule: Schedule) -> str:
    """The picture, as the text of an SVG file."""
    width = _LEFT + _COLUMN * len(schedule.rounds) + 40
    height = _TOP + _ROW * schedule.ranks
    title = f"{schedule.collective.value} by {schedule.name}: {schedule.ranks} ranks, {schedule.slots} slots"
    parts = [_head(width, height), f'<text x="16" y="22" font-size="15" font-weight="bold">{title}</text>']
    parts += [_rank_line(rank, width) for rank in range(schedule.ranks)]
    for number, part in enumerate(schedule.rounds):
        parts.append(f'<text x="{_x(number)}" y="42" text-anchor="middle" fill="#666">{number + 1}</text>')
        for source, target, begin, _, width, reduce in zip(*(column.tolist() for column in part), strict=True):
            fans_out = int((part.source == source).sum()) > 1
            parts.append(_arrow(number, source, target, begin, width, reduce, 0.84 if fans_out else 0.12))
    return "\n".join([*parts, "</svg>", ""])


def _head(width: int, height: int) -> str:
    markers = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{colour}"/></marker>'
        for name, colour in (("reduce", _REDUCE), ("copy", _COPY))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/><defs>{markers}</defs>'
    )


def _rank_line(rank: int, width: int) -> str:
    y = _y(rank)
    return (
        f'<text x="16" y="{y + 4}">rank {rank}</text>'
        f'<line x1="{_LEFT}" y1="{y}" x2="{width - 20}" y2="{y}" stroke="#ddd"/>'
    )


def _arrow(number: int, source: int, target: int, begin: int, width: int, reduce: bool, label_at: float) -> str:
    name, colour = ("reduce", _REDUCE) if reduce else ("copy", _COPY)
    x1, x2 = _x(number) - _COLUMN * 0.38, _x(number) + _COLUMN * 0.38
    y1, y2 = _y(source), _y(target)
    slots = f"{begin}" if width == 1 else f"{begin}-{begin + width - 1}"
    # The label stands where arrows of one round are apart: near the tail, or the head of those that fan out.
    at_x, at_y = x1 + label_at * (x2 - x1), y1 + label_at * (y2 - y1)
    return (
        f'<line x1="{x1:.0f}" y1="{y1}" x2="{x2:.0f}" y2="{y2}" stroke="{colour}" stroke-width="1.6" '
        f'marker-end="url(#{name})"/>'
        f'<text x="{at_x:.0f}" y="{at_y - 4:.0f}" fill="{colour}" font-size="11">{slots}</text>'
    )


def _x(number: int) -> float:
    return _LEFT + _COLUMN * (number + 0.5)


def _y(rank: int) -> int:
    return _TOP + _ROW * rank + _ROW // 2
