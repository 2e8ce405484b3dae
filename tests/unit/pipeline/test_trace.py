"""Traces: what a viewer needs, and names that people understand."""

from __future__ import annotations

import itertools
import json

import pytest

from p2pdrl.pipeline.layers import PeerLink
from p2pdrl.pipeline.schedule import make_schedule
from p2pdrl.pipeline.timeline import MicrobatchCosts, predict
from p2pdrl.pipeline.trace import RankSpans, TraceSpan, predicted_trace, trace


def boxes(document):
    return [event for event in document["traceEvents"] if event["ph"] == "X"]


def names(document, what):
    return [event["args"]["name"] for event in document["traceEvents"] if event["name"] == what]


def rows_overlap(document):
    ends = {}
    for box in sorted(boxes(document), key=lambda box: box["ts"]):
        row = box["pid"], box["tid"]
        if box["ts"] < ends.get(row, 0.0) - 1e-6:
            return True
        ends[row] = box["ts"] + box["dur"]
    return False


def test_ranks_of_different_clocks_come_together():
    head = RankSpans(
        "node a", [TraceSpan("forward", 100.0, 100.5, 0, 0, 7), TraceSpan("step", 101.0, 101.25, step=7)]
    )
    tail = RankSpans("node b", [TraceSpan("recv_activation", 5.25, 5.75, 1, 0, 7)], offset_s=95.0)
    document = json.loads(json.dumps(trace({"pipeline 1": [head, tail]})))
    assert names(document, "process_name") == ["pipeline 1"]
    assert names(document, "thread_name") == ["node a", "node b"]
    forward, step, wait = boxes(document)
    assert forward == {
        "name": "forward 1",
        "cat": "forward",
        "ph": "X",
        "pid": 0,
        "tid": 0,
        "ts": 0.0,
        "dur": 500_000.0,
        "args": {"microbatch": 1, "stage": 1, "minibatch": 8},
        "cname": "thread_state_running",
    }
    assert (step["name"], step["ts"], step["args"]) == ("step", 1_000_000.0, {"minibatch": 8})
    assert (wait["name"], wait["cat"], wait["ts"], wait["tid"]) == (
        "wait for activation 1",
        "wait",
        250_000.0,
        1,
    )


def test_each_pipeline_is_a_process():
    ranks = [RankSpans("a", [TraceSpan("forward", 1.0, 2.0)])]
    document = trace({"one": ranks, "other": ranks})
    assert [box["pid"] for box in boxes(document)] == [0, 1]
    assert names(document, "process_name") == ["one", "other"]


def test_nothing_makes_an_empty_trace():
    assert trace({}) == {"traceEvents": [], "displayTimeUnit": "ms"}
    assert boxes(trace({"one": [RankSpans("a", [])]})) == []


def test_a_clock_that_went_back_makes_no_negative_box():
    (box,) = boxes(trace({"one": [RankSpans("a", [TraceSpan("forward", 2.0, 1.0)])]}))
    assert box["dur"] == 0.0


@pytest.mark.parametrize("link", [PeerLink(), PeerLink(0.3, 100.0), PeerLink(5.0, 1000.0)])
@pytest.mark.parametrize(
    ("name", "stages", "ranks"), [("1f1b", 3, 3), ("gpipe", 3, 3), ("interleaved", 4, 2)]
)
def test_a_prediction_is_shown_whole(name, stages, ranks, link):
    costs = MicrobatchCosts((1.0,) * stages, (2.0,) * stages, 50.0, link)
    timeline = predict(make_schedule(name, stages, 4, ranks=ranks), costs)
    document = json.loads(json.dumps(predicted_trace(timeline)))
    assert not rows_overlap(document)
    computed = [box for box in boxes(document) if box["cat"] in ("forward", "backward")]
    assert len(computed) == 2 * 4 * stages
    last = max(box["ts"] + box["dur"] for box in computed)
    assert last == pytest.approx(timeline.total_s * 1e6)
    for rank, busy_s in enumerate(timeline.busy_s):
        assert sum(box["dur"] for box in computed if box["tid"] == rank) == pytest.approx(busy_s * 1e6)
    rows = names(document, "thread_name")
    assert rows[:ranks] == [f"rank {rank}" for rank in range(ranks)]
    assert any("sends" in row for row in rows) == (link != PeerLink())
    assert all(one <= other for one, other in itertools.pairwise(rows[ranks:]))
