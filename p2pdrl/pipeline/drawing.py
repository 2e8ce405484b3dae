"""A timeline as text: a row per rank, time from left to right, dots where it computes nothing.

``F3----`` is the forward of the third microbatch, ``B3`` its backward, as long as they take: here, as in the
papers' figures, microbatches count from 1. Where a rank holds several stages a letter tells which: ``F3b`` is
that of its second. Where there is no room for a name, its first letter fills the place.
"""

from __future__ import annotations

import math

from p2pdrl.pipeline.schedule import Action
from p2pdrl.pipeline.timeline import Timed, Timeline

__all__ = ["draw", "legend"]


def draw(timeline: Timeline, width: int) -> list[str]:
    """Draw one line per rank and one of time.

    Args:
        timeline: what to draw.
        width: columns at most, of which the names of the ranks take some; at least 30 are used.
    """
    names = [f"rank {rank}" for rank in range(len(timeline.rows))]
    indent = len(names[-1]) + 2
    columns = _columns(timeline, max(30, width) - indent)
    lines = [f"{name:<{indent}}{_row(timeline, rank, columns)}" for rank, name in enumerate(names)]
    end = f"{timeline.total_s:.4g} s"
    axis = "0" + end.rjust(max(columns - 1, len(end) + 1))
    return [*lines, " " * indent + axis]


def legend(timeline: Timeline) -> str:
    """Say in a line what the drawing's signs are."""
    if timeline.stages > len(timeline.rows):
        return "F1a--: forward of microbatch 1, stage a of the rank; B: backward; dots: waiting"
    return "F1--: forward of microbatch 1, as long as it takes; B: backward; dots: waiting"


def _columns(timeline: Timeline, room: int) -> int:
    """Of the whole time; whole numbers for the quickest action where they fit, up to its name and a space."""
    computed = [t for row in timeline.rows for t in row if _computes(t) and t.end_s > t.start_s]
    quickest_s = min(t.end_s - t.start_s for t in computed)
    longest = max(len(_label(timeline, t.action)) for t in computed)
    quickest = timeline.total_s / quickest_s
    if quickest > room:
        return room
    return round(min(longest + 1, room // quickest) * quickest)


def _row(timeline: Timeline, rank: int, columns: int) -> str:
    cells = ["."] * columns
    for t in timeline.rows[rank]:
        if _computes(t):
            first, end = (_column(timeline, time_s, columns) for time_s in (t.start_s, t.end_s))
            cells[first:end] = _block(_label(timeline, t.action), end - first)
    return "".join(cells)


def _column(timeline: Timeline, time_s: float, columns: int) -> int:
    """The nearest column; what ends when another begins shares its edge."""
    return math.floor(time_s / timeline.total_s * columns + 0.5)


def _block(label: str, size: int) -> str:
    if size < len(label):
        return label[0] * size
    return label.ljust(size - 1, "-").ljust(size)


def _label(timeline: Timeline, action: Action) -> str:
    ranks = len(timeline.rows)
    chunk = action.stage // ranks
    several = timeline.stages > ranks
    letter = (chr(ord("a") + chunk) if chunk < 26 else "+") if several else ""
    return f"{action.kind[0].upper()}{action.microbatch + 1}{letter}"


def _computes(timed: Timed) -> bool:
    return timed.action.kind in {"forward", "backward"}
