"""What travels beside activations and gradients, against times worked out by hand."""

from __future__ import annotations

import math

import pytest

from p2pdrl.pipeline.advice import busiest, fetch_s, spread_s, step_s
from p2pdrl.pipeline.layers import FREE, PeerLink
from p2pdrl.pipeline.schedule import make_schedule
from p2pdrl.pipeline.timeline import MicrobatchCosts, predict

SLOW = PeerLink(1.0, 100.0)
"""1 s, and 100 bytes a second."""


def timeline(costs, microbatches=1):
    return predict(make_schedule("gpipe", costs.stages, microbatches), costs)


def test_slices_pass_through_those_above():
    """Rank 2 is asked at 2 and has sent at 5; rank 1 has that at 6, sends until 9, and it is there at 10."""
    assert fetch_s([50.0, 100.0, 300.0], SLOW) == 10.0


def test_slices_queue_behind_each_other():
    """Rank 1, asked at 1, sends its own until 21; rank 2's, there since 6, until 24; arrives at 25."""
    assert fetch_s([50.0, 2000.0, 300.0], SLOW) == 25.0


def test_the_first_rank_needs_nobody_to_fetch_its_own():
    assert fetch_s([50.0], SLOW) == 0.0
    assert spread_s(400.0, 1, SLOW) == 0.0


def test_directions_differ():
    links = {(0, 1): PeerLink(2.0, 10.0), (1, 0): PeerLink(0.5, 100.0)}
    assert fetch_s([0.0, 100.0], links) == 2.0 + 1.0 + 0.5
    assert spread_s(100.0, 2, links) == 2.0 + 10.0


def test_what_is_spread_passes_hop_by_hop():
    assert spread_s(400.0, 3, SLOW) == 2 * (1.0 + 4.0)


def test_the_step_waits_for_the_last_gradient():
    """Forward 1, there at 3, forward and backward until 5, there at 7, backward until 8."""
    costs = MicrobatchCosts((1.0, 1.0), (1.0, 1.0), 100.0, SLOW)
    assert step_s(timeline(costs), SLOW) == timeline(costs).total_s == 8.0


def test_the_step_waits_for_sums_that_come_after_a_long_backward():
    """All gradients come free of charge, but the sums of squares wait for both slow ranks and two hops."""
    links = PeerLink(latency_s=5.0)
    costs = MicrobatchCosts((1.0, 1.0, 1.0), (0.0, 1.0, 1.0), 0.0, links)
    # forwards end at 1, 7, 13; backward of rank 2 ends at 14, of rank 1 at 20, of rank 0 at 25
    assert step_s(timeline(costs), links) == 25.0
    # with nothing to send sums still need their two hops
    assert step_s(predict(make_schedule("gpipe", 1, 1), MicrobatchCosts((1.0,), (1.0,))), FREE) == 2.0


def test_the_busiest_link_is_found():
    links = {(0, 1): PeerLink(0.0, 1000.0), (1, 0): PeerLink(0.25, 1000.0), (1, 2): SLOW, (2, 1): SLOW}
    costs = MicrobatchCosts((1.0,) * 3, (1.0,) * 3, (100.0, 200.0), links)
    found = busiest(timeline(costs, 2), costs, 3, [0.0, 1000.0, 300.0], 60.0)
    # 2 microbatches and 3 minibatches of 200 bytes each way, 300 up, 60 down
    assert found.ranks == (1, 2)
    assert found.update_bytes == 2 * 2 * 3 * 200 + 300 + 60
    assert found.busy_s == pytest.approx(27.6)
    assert found.bandwidth_bytes_s == pytest.approx(100.0)
    assert found.latency_s == 1.0


def test_links_without_cost_are_no_reason():
    costs = MicrobatchCosts((1.0, 1.0), (1.0, 1.0), 100.0, FREE)
    assert busiest(timeline(costs), costs, 1, [0.0, 5.0]) is None
    alone = MicrobatchCosts((1.0,), (1.0,))
    assert busiest(timeline(alone), alone, 1, [0.0]) is None


def test_a_link_may_have_a_latency_only():
    costs = MicrobatchCosts((1.0, 1.0), (1.0, 1.0), 100.0, PeerLink(0.5))
    found = busiest(timeline(costs), costs, 1, [0.0, 5.0])
    assert (found.latency_s, found.busy_s, found.bandwidth_bytes_s) == (0.5, 0.0, math.inf)
