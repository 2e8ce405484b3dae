"""Predicted times against the papers' formulas, values worked out by hand, and an event-driven simulation."""

from __future__ import annotations

import heapq
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.layers import PeerLink
from p2pdrl.pipeline.schedule import make_schedule, route
from p2pdrl.pipeline.timeline import MicrobatchCosts, predict


def even(stages, forward_s, backward_s, **more):
    return MicrobatchCosts((forward_s,) * stages, (backward_s,) * stages, **more)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 8, 16])
def test_equal_stages_take_what_the_papers_say(name, stages, microbatches):
    f, b, m, s = 0.25, 0.5, microbatches, stages
    timeline = predict(make_schedule(name, s, m), even(s, f, b))
    assert timeline.total_s == (m + s - 1) * (f + b)
    assert timeline.bubbles == pytest.approx([(s - 1) / (m + s - 1)] * s)
    assert timeline.busy_s == (m * (f + b),) * s
    assert timeline.one_device_s == s * m * (f + b)
    assert timeline.speedup == pytest.approx(s * m / (m + s - 1))
    assert timeline.ideal_speedup == pytest.approx(timeline.speedup)
    assert timeline.stored == (tuple(min(m, s - r) for r in range(s)) if name == "1f1b" else (m,) * s)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_interleaved_takes_what_the_paper_says(ranks, chunks, rounds):
    f, b, m = 0.25, 0.5, ranks * rounds  # of one stage, 1/V of the rank's layers
    timeline = predict(
        make_schedule("interleaved", ranks * chunks, m, ranks=ranks), even(ranks * chunks, f, b)
    )
    assert timeline.total_s == (chunks * m + ranks - 1) * (f + b)
    assert timeline.bubbles == pytest.approx([(ranks - 1) / (chunks * m + ranks - 1)] * ranks)
    assert timeline.speedup == pytest.approx(timeline.ideal_speedup)


def test_times_worked_out_by_hand():
    """Two stages, two microbatches; a message takes 0.5 s of the link and arrives 0.25 s later."""
    link = PeerLink(latency_s=0.25, bandwidth_bytes_s=2.0)
    costs = MicrobatchCosts((1.0, 2.0), (3.0, 1.0), message_bytes=1.0, links=link)
    timeline = predict(make_schedule("1f1b", 2, 2), costs)
    spans = [[(t.action.kind, t.action.microbatch, t.start_s, t.end_s) for t in row] for row in timeline.rows]
    assert spans[0] == [
        ("forward", 0, 0.0, 1.0), ("send_activation", 0, 1.0, 1.75),
        ("forward", 1, 1.0, 2.0), ("send_activation", 1, 2.0, 2.75),
        ("recv_gradient", 0, 2.0, 5.5), ("backward", 0, 5.5, 8.5),
        ("recv_gradient", 1, 8.5, 8.5), ("backward", 1, 8.5, 11.5),
    ]  # fmt: skip
    assert spans[1] == [
        ("recv_activation", 0, 0.0, 1.75), ("forward", 0, 1.75, 3.75),
        ("backward", 0, 3.75, 4.75), ("send_gradient", 0, 4.75, 5.5),
        ("recv_activation", 1, 4.75, 4.75), ("forward", 1, 4.75, 6.75),
        ("backward", 1, 6.75, 7.75), ("send_gradient", 1, 7.75, 8.5),
    ]  # fmt: skip
    assert timeline.total_s == 11.5
    assert timeline.busy_s == (8.0, 6.0)
    assert timeline.bubbles == pytest.approx([1 - 8 / 11.5, 1 - 6 / 11.5])
    assert timeline.one_device_s == 14.0


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("link", [PeerLink(0.25), PeerLink(0.0, 4.0)])
def test_1f1b_cant_hide_messages_as_gpipe_can(stages, link):
    f, b, t = 1.0, 1.0, 0.25
    for name, each_s in [("1f1b", f + b + 2 * t * (stages - 1) / stages), ("gpipe", f + b)]:
        total_s = [
            predict(make_schedule(name, stages, m), even(stages, f, b, message_bytes=1.0, links=link)).total_s
            for m in (40, 80)
        ]
        assert (total_s[1] - total_s[0]) / 40 == pytest.approx(each_s)


def test_a_direction_of_a_link_carries_one_message_at_a_time():
    """Forwards take a tenth of a message's time: the second activation leaves when the first has left."""
    costs = MicrobatchCosts((0.1, 0.1), (0.1, 0.1), message_bytes=10.0, links=PeerLink(5.0, 10.0))
    timeline = predict(make_schedule("gpipe", 2, 3), costs)
    sends = [t for t in timeline.rows[0] if t.action.kind == "send_activation"]
    assert [t.start_s for t in sends] == pytest.approx([0.1, 1.1, 2.1])
    assert [t.end_s for t in sends] == pytest.approx([6.1, 7.1, 8.1])


def test_directions_dont_share():
    links = {(0, 1): PeerLink(0.0, 1.0), (1, 0): PeerLink(7.0)}
    timeline = predict(make_schedule("gpipe", 2, 1), even(2, 1.0, 1.0, message_bytes=2.0, links=links))
    assert timeline.total_s == 1 + 2 + 1 + 1 + 7 + 1


def test_two_ranks_that_interleave_share_a_direction_between_activations_and_gradients():
    schedule = make_schedule("interleaved", 4, 2, ranks=2)
    costs = even(4, 1.0, 1.0, message_bytes=(1.0, 2.0, 3.0), links=PeerLink(0.0, 1.0))
    timeline = predict(schedule, costs)
    for rank in range(2):
        sends = sorted(t[1:] for t in timeline.rows[rank] if t.action.kind.startswith("send"))
        assert {t.action.kind for t in timeline.rows[rank]} >= {"send_activation", "send_gradient"}
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(sends))


def test_stages_on_one_rank_send_nothing():
    timeline = predict(make_schedule("interleaved", 3, 4, ranks=1), even(3, 1.0, 2.0, message_bytes=1e9))
    assert timeline.total_s == timeline.one_device_s == 36.0
    assert timeline.bubbles == (0.0,)
    assert timeline.speedup == timeline.ideal_speedup == 1.0


def event_driven(schedule, costs):
    """The end of the last backward, by a heap of events: another way than the product's."""
    ranks = len(schedule)
    at, waiting, arrived, queues, busy = [0] * ranks, [None] * ranks, set(), {}, set()
    events = [(0.0, n, "go", n) for n in range(ranks)]
    number = itertools.count(ranks)
    last = 0.0

    def leave(pair, now):
        if pair in busy or not queues.get(pair):
            return
        busy.add(pair)
        way, microbatch = queues[pair].pop(0)
        link = costs.links if isinstance(costs.links, PeerLink) else costs.links[pair]
        left = now + costs.boundary_bytes(way) / link.bandwidth_bytes_s
        heapq.heappush(events, (left, next(number), "free", pair))
        heapq.heappush(events, (left + link.latency_s, next(number), "arrive", (way, microbatch)))

    while events:
        now, _, what, data = heapq.heappop(events)
        if what == "free":
            busy.remove(data)
            leave(data, now)
        elif what == "arrive":
            arrived.add(data)
            rank = data[0].target % ranks
            if waiting[rank] == data:
                waiting[rank] = None
                heapq.heappush(events, (now, next(number), "go", rank))
        else:
            rank = data
            while at[rank] < len(schedule[rank]):
                action = schedule[rank][at[rank]]
                if action.kind in {"forward", "backward"}:
                    times = costs.forward_s if action.kind == "forward" else costs.backward_s
                    at[rank] += 1
                    last = max(last, now + times[action.stage])
                    heapq.heappush(events, (now + times[action.stage], next(number), "go", rank))
                    break
                way = route(action)
                pair, message = (way.source % ranks, way.target % ranks), (way, action.microbatch)
                if action.kind.startswith("send"):
                    queues.setdefault(pair, []).append(message)
                    leave(pair, now)
                elif message not in arrived:
                    waiting[rank] = message
                    break
                at[rank] += 1
    assert at == [len(actions) for actions in schedule]
    return last


seconds = st.floats(0.0, 10.0)


@st.composite
def cases(draw):
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    ranks = draw(st.integers(1, 5))
    stages = ranks * draw(st.integers(2, 3)) if name == "interleaved" else ranks
    microbatches = ranks * draw(st.integers(1, 3)) if name == "interleaved" else draw(st.integers(1, 8))
    schedule = make_schedule(name, stages, microbatches, ranks=ranks)
    times = st.lists(seconds, min_size=stages, max_size=stages).map(tuple)
    links = st.builds(PeerLink, seconds, st.floats(0.5, 100.0))
    pairs = [(r, other) for r in range(ranks) for other in range(ranks)]
    costs = MicrobatchCosts(
        draw(times.filter(any)),
        draw(times),
        tuple(draw(seconds) for _ in range(stages - 1)),
        draw(links) if draw(st.booleans()) else {pair: draw(links) for pair in pairs},
    )
    return schedule, costs


@given(cases())
@settings(max_examples=150, deadline=None)
def test_an_event_driven_simulation_takes_as_long(case):
    schedule, costs = case
    timeline = predict(schedule, costs)
    assert timeline.total_s == pytest.approx(event_driven(schedule, costs))


@given(cases())
@settings(deadline=None)
def test_what_holds_of_every_timeline(case):
    schedule, costs = case
    timeline = predict(schedule, costs)
    assert [[t.action for t in row] for row in timeline.rows] == [list(actions) for actions in schedule]
    ends = {t.action: t.end_s for row in timeline.rows for t in row}
    for row in timeline.rows:
        own = [t for t in row if not t.action.kind.startswith("send")]
        assert all(one.end_s == other.start_s for one, other in itertools.pairwise(own))
        for t in row:
            assert 0 <= t.start_s <= t.end_s
            if t.action.kind == "recv_activation":
                assert t.end_s >= ends[t.action._replace(kind="send_activation", stage=t.action.stage - 1)]
            elif t.action.kind == "recv_gradient":
                assert t.end_s >= ends[t.action._replace(kind="send_gradient", stage=t.action.stage + 1)]
    assert timeline.total_s >= max(timeline.busy_s) * (1 - 1e-12)
    assert all(0 <= bubble <= 1 for bubble in timeline.bubbles)
    assert timeline.speedup <= len(schedule) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("costs", "why"),
    [
        (MicrobatchCosts((1.0,), (1.0, 2.0)), "1 forward times need as many backward times, not 2"),
        (
            MicrobatchCosts((1.0, -1.0), (1.0, 2.0)),
            "seconds of a stage must be finite and not negative, not -1.0",
        ),
        (MicrobatchCosts((1.0, math.nan), (1.0, 2.0)), "not nan"),
        (MicrobatchCosts((1.0, math.inf), (1.0, 2.0)), "not inf"),
        (MicrobatchCosts((0.0, 0.0), (0.0, 0.0)), "more than 0 seconds"),
        (even(2, 1.0, 1.0, message_bytes=(1.0, 2.0)), "2 stages have 1 messages' bytes, not 2"),
        (even(2, 1.0, 1.0, message_bytes=-1.0), "bytes of a message"),
        (even(2, 1.0, 1.0, links=PeerLink(-1.0)), "latency of a link"),
        (even(2, 1.0, 1.0, links={(0, 1): PeerLink(0.0, 0.0)}), "bandwidth of a link must be positive"),
        (even(2, 1.0, 1.0, links={(0, 1): PeerLink()}), "nothing is known about the link from 1 to 0"),
        (even(3, 1.0, 1.0), "no schedule of 2 microbatches through 3 stages has 2 ranks"),
    ],
)
def test_bad_costs_are_told(costs, why):
    with pytest.raises(ConfigError, match=why):
        predict(make_schedule("gpipe", 2, 2), costs)


def test_an_empty_schedule_is_told():
    with pytest.raises(ConfigError, match="has 0 ranks"):
        predict((), even(2, 1.0, 1.0))
