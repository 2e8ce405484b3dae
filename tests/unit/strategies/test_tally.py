from __future__ import annotations

import math

import pytest

from p2pdrl.strategies.protocol import RoundReport
from p2pdrl.strategies.tally import Tally
from p2pdrl.strategies.testing.swarm import FakeSwarm
from p2pdrl.transport.protocol import Address


def test_each_end_is_counted_and_told():
    swarm = FakeSwarm("me")
    tally = Tally(swarm)
    tally.ended(RoundReport("ok", seconds=0.5))
    tally.ended(RoundReport("answered", seconds=0.2), ours=False)
    assert tally.outcomes == {"ok": 1, "answered": 1}
    assert (tally.count("ok"), tally.count("busy")) == (1, 0)
    assert swarm.seen == [("ok", 0.5)]
    assert [report.outcome for report in swarm.rounds] == ["ok", "answered"]


def test_the_distance_is_a_fading_mean_of_squares():
    swarm = FakeSwarm("me")
    swarm.peers = {str(number): Address("10.0.0.1", number) for number in range(3)}
    tally = Tally(swarm)
    assert tally.consensus_distance is None
    tally.met(4.0)
    assert tally.consensus_distance == pytest.approx(math.sqrt(16 * 3 / 8))
    tally.met(0.0)
    assert tally.consensus_distance == pytest.approx(math.sqrt(0.8 * 16 * 3 / 8))
