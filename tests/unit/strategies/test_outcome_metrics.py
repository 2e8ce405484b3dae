from __future__ import annotations

import math

import pytest

from p2pdrl.strategies.protocol import RoundReport
from p2pdrl.strategies.task_runner import OutcomeMetrics
from p2pdrl.testing.virtual_swarm import FakeSwarm
from p2pdrl.transport.protocol import Address


def test_each_end_is_counted_and_told():
    swarm = FakeSwarm("me")
    outcomes = OutcomeMetrics(swarm)
    outcomes.ended(RoundReport("ok", seconds=0.5))
    outcomes.ended(RoundReport("answered", seconds=0.2), ours=False)
    assert outcomes.outcomes == {"ok": 1, "answered": 1}
    assert (outcomes.count("ok"), outcomes.count("busy")) == (1, 0)
    assert swarm.seen == [("ok", 0.5)]
    assert [report.outcome for report in swarm.rounds] == ["ok", "answered"]


def test_the_distance_is_a_fading_mean_of_squares():
    swarm = FakeSwarm("me")
    swarm.peers = {str(number): Address("10.0.0.1", number) for number in range(3)}
    outcomes = OutcomeMetrics(swarm)
    assert outcomes.consensus_distance is None
    outcomes.met(4.0)
    assert outcomes.consensus_distance == pytest.approx(math.sqrt(16 * 3 / 8))
    outcomes.met(0.0)
    assert outcomes.consensus_distance == pytest.approx(math.sqrt(0.8 * 16 * 3 / 8))
