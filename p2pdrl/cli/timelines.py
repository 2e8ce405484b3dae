"""A predicted schedule as text and as JSON: what ``p2pdrl pipeline plan`` shows."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from p2pdrl.pipeline.drawing import draw

if TYPE_CHECKING:
    from p2pdrl.pipeline.timeline import Timeline

__all__ = ["timeline_document", "timeline_lines"]

_WIDTH = 100
"""Columns of output that doesn't go to a terminal."""


def timeline_document(timeline: Timeline) -> dict[str, Any]:
    """Return everything, as JSON has it."""
    ranks = range(len(timeline.rows))
    return {
        "stages": timeline.stages,
        "ranks": len(ranks),
        "microbatches": timeline.microbatches,
        "step_s": timeline.total_s,
        "one_device_s": timeline.one_device_s,
        "speedup": timeline.speedup,
        "ideal_speedup": timeline.ideal_speedup,
        "per_rank": [
            {
                "rank": rank,
                "stages": list(range(rank, timeline.stages, len(ranks))),
                "busy_s": timeline.busy_s[rank],
                "bubble": timeline.bubbles[rank],
                "stored_activations": timeline.stored[rank],
                "actions": [
                    {**t.action._asdict(), "start_s": t.start_s, "end_s": t.end_s}
                    for t in timeline.rows[rank]
                ],
            }
            for rank in ranks
        ],
    }


def timeline_lines(schedule: str, timeline: Timeline) -> list[str]:
    """Return a picture, and what it comes to."""
    ranks = len(timeline.rows)
    several = f" on {ranks} ranks" if timeline.stages > ranks else ""
    ideal = f"with equal stages and free messages {timeline.ideal_speedup:.2f}"
    lines = [
        f"{schedule}: {timeline.microbatches} microbatches through {timeline.stages} stages{several}",
        "",
        *draw(timeline, shutil.get_terminal_size((_WIDTH, 24)).columns),
        "",
        f"step      {timeline.total_s:.4g} s; one device takes {timeline.one_device_s:.4g} s",
        f"speed-up  {timeline.speedup:.2f} of {ranks}; {ideal}",
        "",
    ]
    computes = [f"{busy_s:.4g} s" for busy_s in timeline.busy_s]
    wide = max(len("computes"), *map(len, computes))
    lines.append(f"rank   {'computes':>{wide}}   bubble   stored activations")
    for rank, (busy, bubble, stored) in enumerate(
        zip(computes, timeline.bubbles, timeline.stored, strict=True)
    ):
        lines.append(f"{rank:>4}   {busy:>{wide}}   {bubble:>6.1%}   {stored:>18}")
    return lines
