"""Pipelines as traces that ``chrome://tracing`` and Perfetto show: what happened, or what was predicted.

A row for each rank, a box for each thing that it did or waited for. Predicted sends are in further rows, as
many as messages are under way at once, since their rank computes meanwhile. The format is Chrome's JSON, with
complete events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from p2pdrl.pipeline.timeline import Timeline

__all__ = ["MOST_SPANS", "RankSpans", "TraceSpan", "predicted_trace", "trace"]


MOST_SPANS = 4096
"""That a rank remembers. Of one with 4 microbatches about 200 minibatches; less than a megabyte."""


class TraceSpan(NamedTuple):
    """Something that a rank did.

    Attributes:
        what: kind of an action of `schedule`, whose receives are waits; or another word, like ``step``.
        start_s: of its rank's monotonic clock.
        stage: from 0; −1 where it is about none.
        microbatch: from 0; −1 where it is about none.
        step: number of the minibatch; −1 where it is about none.
    """

    what: str
    start_s: float
    end_s: float
    stage: int = -1
    microbatch: int = -1
    step: int = -1


class RankSpans(NamedTuple):
    """What one rank tells.

    Attributes:
        offset_s: to be added to its times, so that those of all ranks are of one clock.
    """

    name: str
    spans: Sequence[TraceSpan]
    offset_s: float = 0.0


_WORDS = {
    "forward": "forward",
    "backward": "backward",
    "send_activation": "send activation",
    "send_gradient": "send gradient",
    "recv_activation": "wait for activation",
    "recv_gradient": "wait for gradient",
}

_COLOURS = {
    "forward": "thread_state_running",
    "backward": "thread_state_runnable",
    "recv_activation": "grey",
    "recv_gradient": "grey",
}
"""Names that Chrome knows; who shows the trace otherwise has colours of its own."""


def trace(pipelines: Mapping[str, Sequence[RankSpans]]) -> dict[str, Any]:
    """Make one trace of what the ranks of some pipelines did; times begin at the first span of all."""
    starts = (
        span.start_s + rank.offset_s for ranks in pipelines.values() for rank in ranks for span in rank.spans
    )
    begin_s = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    for process, (name, ranks) in enumerate(pipelines.items()):
        events += _names(process, name, [rank.name for rank in ranks])
        for row, rank in enumerate(ranks):
            events += (_event(process, row, span, rank.offset_s - begin_s) for span in rank.spans)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def predicted_trace(timeline: Timeline, name: str = "predicted") -> dict[str, Any]:
    """Make a trace of a prediction, in the same format."""
    rows: list[tuple[str, list[TraceSpan]]] = []
    sends: list[tuple[str, list[TraceSpan]]] = []
    for rank, row in enumerate(timeline.rows):
        spans = [
            TraceSpan(t.action.kind, t.start_s, t.end_s, t.action.stage, t.action.microbatch)
            for t in row
            if t.end_s > t.start_s
        ]
        rows.append((f"rank {rank}", [span for span in spans if not span.what.startswith("send")]))
        sent = [span for span in spans if span.what.startswith("send")]
        sends += ((f"rank {rank} sends", lane) for lane in _side_by_side(sent))
    events = _names(0, name, [row for row, _ in (*rows, *sends)])
    for thread, (_, spans) in enumerate((*rows, *sends)):
        events += (_event(0, thread, span, 0.0) for span in spans)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _side_by_side(spans: Sequence[TraceSpan]) -> list[list[TraceSpan]]:
    """As few rows as it takes so that in none of them two spans are at the same time."""
    rows: list[list[TraceSpan]] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        free = next((row for row in rows if row[-1].end_s <= span.start_s), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows


def _names(process: int, name: str, rows: Iterable[str]) -> list[dict[str, Any]]:
    """What the viewer calls a pipeline and its ranks, and in which order it shows them."""
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}
    ]
    for thread, row in enumerate(rows):
        at = {"ph": "M", "pid": process, "tid": thread}
        events.append({"name": "thread_name", **at, "args": {"name": row}})
        events.append({"name": "thread_sort_index", **at, "args": {"sort_index": thread}})
    return events


def _event(process: int, thread: int, span: TraceSpan, offset_s: float) -> dict[str, Any]:
    """A box; like the figures of papers it counts from 1."""
    words = _WORDS.get(span.what, span.what)
    start_us, end_us = (round((time_s + offset_s) * 1e6, 3) for time_s in (span.start_s, span.end_s))
    event: dict[str, Any] = {
        "name": f"{words} {span.microbatch + 1}" if span.microbatch >= 0 else words,
        "cat": "wait" if span.what.startswith("recv") else span.what.split("_")[0],
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": start_us,
        "dur": round(max(0.0, end_us - start_us), 3),
        "args": {
            key: value
            for key, value in (
                ("microbatch", span.microbatch + 1),
                ("stage", span.stage + 1),
                ("minibatch", span.step + 1),
            )
            if value > 0
        },
    }
    if span.what in _COLOURS:
        event["cname"] = _COLOURS[span.what]
    return event
